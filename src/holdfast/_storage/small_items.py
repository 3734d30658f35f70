"""Owns the containers of small tensors, made once for all tensors of a form."""

from typing import NamedTuple

import torch

from holdfast._format.torch_item import SMALL_ALIGNMENT, ItemFrame, tensor_item
from holdfast._io.blocks import crc32
from holdfast._plan.write_columns import Form

SMALL = 128 * 1024
"""Items whose payload is smaller are written, and read, together with their neighbours: three calls to the
file for each of 100,000 tensors of 16 bytes would take longer than everything else together.
"""


class ItemTemplate(NamedTuple):
    """What all small items of one form have in common.

    Attributes:
        shape: The shape that the tensor must have.
        dtype: The dtype that it must have.
        is_complex: Whether elements may be promised as conjugates.
        nbytes: The bytes of its elements.
        head: The container before them.
        head_sum: Its CRC-32.
        tail: The container after them, around the two places of the checksum.
        item_nbytes: The length of the item.
        gap: What follows it, so that the next one begins at an aligned place.
        total: The length of both.
    """

    shape: torch.Size
    dtype: torch.dtype
    is_complex: bool
    nbytes: int
    head: bytes
    head_sum: int
    tail: tuple[bytes, bytes, bytes]
    item_nbytes: int
    gap: bytes
    total: int


def template_of(form: Form) -> ItemTemplate:
    """The template for the small tensors of a form."""
    dtype = form.properties[0]
    frame = frame_of(dtype, form.lengths)
    head, nbytes = frame.head(0), frame.nbytes(0)
    gap = bytes(-nbytes % SMALL_ALIGNMENT)
    return ItemTemplate(
        form.lengths,
        dtype,
        dtype.is_complex,
        form.nbytes,
        head,
        crc32(head),
        frame.tail_around_checksums(0),
        nbytes,
        gap,
        nbytes + len(gap),
    )


def frame_of(dtype: torch.dtype, shape: torch.Size) -> ItemFrame:
    """The container of a tensor."""
    return tensor_item(str(dtype).removeprefix("torch."), tuple(shape))
