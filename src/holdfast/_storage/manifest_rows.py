"""A quick look at all rows of a manifest: whether any could be bad."""

import sys

import torch

from holdfast._format.manifest import Manifest
from holdfast._plan.metadata_entries import numbers_of

__all__ = ["rows_are_sound"]

# Sums and products of a few numbers below it stay below 2**63.
_LARGEST = 1 << 60


def rows_are_sound(manifest: Manifest) -> bool:
    """Whether every item lies in its file, every payload in its item and every chunk in its tensor.

    A fifth of the time that it takes without torch, which ``_format`` does without. False says only that
    somebody should look closer. The columns must have the right lengths and no negative numbers.
    """
    if sys.byteorder != "little":
        return False
    return _references_are_sound(manifest) and _items_are_sound(manifest) and _boxes_are_sound(manifest)


def _references_are_sound(m: Manifest) -> bool:
    return (
        _is_below(numbers_of(m.tensor_properties, small=True), len(m.properties))
        and _is_below(numbers_of(m.item_transforms, small=True), len(m.transforms))
        and _is_below(numbers_of(m.item_files, small=True), len(m.file_names))
        and len(m.checksums) == 4 * int(numbers_of(m.item_blocks, small=True).sum())
    )


def _items_are_sound(m: Manifest) -> bool:
    starts, nbytes = numbers_of(m.item_offsets), numbers_of(m.item_nbytes)
    payload_starts, payloads = numbers_of(m.item_payload_offsets), numbers_of(m.item_payload_nbytes)
    numbers = (starts, nbytes, payload_starts, payloads)
    if m.block_size >= _LARGEST or not all(_is_below(column, _LARGEST) for column in numbers):
        return False
    sizes = numbers_of(m.file_nbytes)[numbers_of(m.item_files, small=True)]
    blocks = torch.div(payloads + (m.block_size - 1), m.block_size, rounding_mode="floor")
    return (
        not bool((starts + nbytes > sizes).any())
        and not bool((payload_starts + payloads > nbytes).any())
        and torch.equal(blocks, numbers_of(m.item_blocks, small=True).long())
    )


def _boxes_are_sound(m: Manifest) -> bool:
    shapes, ndims = numbers_of(m.tensor_shapes), torch.tensor(list(m.tensor_ndims), dtype=torch.int64)
    offsets, lengths = numbers_of(m.chunk_offsets), numbers_of(m.chunk_lengths)
    counts = numbers_of(m.tensor_chunks, small=True).long()
    if not shapes.numel():
        return True
    if int(shapes.max()) ** int(ndims.max()) >= _LARGEST or not _is_below(
        torch.maximum(offsets, lengths), _LARGEST
    ):
        return False
    return not bool((offsets + lengths > _extents(shapes, ndims, counts)).any())


def _extents(shapes: torch.Tensor, ndims: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """For each number of each chunk how long its tensor is in that dimension."""
    starts = torch.cumsum(ndims, 0) - ndims
    of_chunk = torch.repeat_interleave(torch.arange(len(ndims)), counts)
    ndim_of_chunk = ndims[of_chunk]
    begins = torch.cumsum(ndim_of_chunk, 0) - ndim_of_chunk
    dim = torch.arange(int(ndim_of_chunk.sum())) - torch.repeat_interleave(begins, ndim_of_chunk)
    return shapes[torch.repeat_interleave(starts[of_chunk], ndim_of_chunk) + dim]


def _is_below(numbers: torch.Tensor, limit: int) -> bool:
    """Whether all are from 0 to below ``limit``."""
    if not numbers.numel():
        return True
    low, high = torch.aminmax(numbers)
    return int(low) >= 0 and int(high) < limit
