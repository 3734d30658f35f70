"""Owns reading quantised tensors as the numbers that they stand for: a strip of blocks at a time.

Two kinds are known. A matrix in blocks, each with a factor of its own in ``weight_scale_inv`` (DeepSeek). And
pairs of 4-bit numbers in groups, each with an exponent of its own (MXFP4, gpt-oss): ``_blocks`` of shape
``[..., groups, bytes]`` and ``_scales`` of shape ``[..., groups]`` stand for ``[..., groups * bytes * 2]``.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from holdfast._geometry import Box, row_major_boxes
from holdfast._storage.box_plan import BoxPlanner
from holdfast.errors import InvalidPlanError, UsageError
from holdfast.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from holdfast.planner import LoadPlan, LoadPlanner

STRIP = 8 << 20
"""How many numbers are made at once."""
_SCALE, _WEIGHT = ".weight_scale_inv", ".weight"
_SCALES, _BLOCKS = "_scales", "_blocks"
_EXPONENT_OF_ONE = 127
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Region = tuple[Sequence[int], Sequence[int]]
"""A box of a tensor: where it begins, and its lengths."""

ReadRegions = Callable[[dict[str, Region]], Sequence[torch.Tensor]]
"""Reads boxes of stored tensors, as they are stored."""

ReadPlan = Callable[[LoadPlan, LoadPlanner], None]
"""Reads what a plan says, as it is stored, and hands it to a planner."""


def slices(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    """A box as the index of a tensor."""
    return tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))


def find_scales(keys: Iterable[str]) -> dict[str, str]:
    """The quantised tensors among ``keys``, each with the key of its scales."""
    keys = set(keys)
    pairs = {key.removesuffix(_SCALE) + _WEIGHT: key for key in keys if key.endswith(_SCALE)}
    pairs |= {key.removesuffix(_SCALES) + _BLOCKS: key for key in keys if key.endswith(_SCALES)}
    return {key: scale for key, scale in pairs.items() if key in keys}


def shape_of_numbers(key: str, stored: Sequence[int]) -> torch.Size:
    """The shape of the numbers that a quantised tensor stands for.

    Raises:
        UsageError: It is quantised in a way that is not known.
    """
    if key.endswith(_BLOCKS) and len(stored) > 1:
        return torch.Size([*stored[:-2], stored[-2] * stored[-1] * 2])
    if not key.endswith(_BLOCKS) and len(stored) == 2:
        return torch.Size(stored)
    raise UsageError(f"{key} of shape {tuple(stored)} is quantised in a way that is not known", key=key)


class QuantizedTensor(NamedTuple):
    """One quantised tensor of a model.

    Attributes:
        key: Its key.
        scale: The key of its scales.
        shape: Its shape, as it is stored.
        dtype: What its numbers are wanted as.
        block_size: Rows and columns of a block of a matrix.
    """

    key: str
    scale: str
    shape: Sequence[int]
    dtype: torch.dtype
    block_size: int

    def read(self, offsets: Sequence[int], target: torch.Tensor, read: ReadRegions) -> None:
        """Fill ``target`` with the numbers from ``offsets`` on."""
        whole = Box((0,) * target.dim(), tuple(target.shape))
        for begin, lengths in row_major_boxes(whole, 1, STRIP):
            region = [at + start for at, start in zip(offsets, begin, strict=True)], lengths
            numbers = self._groups(region, read) if self.key.endswith(_BLOCKS) else self._matrix(region, read)
            target[slices(begin, lengths)].copy_(numbers)

    def _matrix(self, region: Region, read: ReadRegions) -> torch.Tensor:
        size = self.block_size
        first = [at // size for at in region[0]]
        counts = [-(-(at + n) // size) - f for at, n, f in zip(*region, first, strict=True)]
        weight, scale = read({self.key: region, self.scale: (first, counts)})
        factors = scale.to(torch.float32)
        for dimension, (at, length) in enumerate(zip(*region, strict=True)):
            factors = factors.repeat_interleave(size, dimension).narrow(dimension, at % size, length)
        return (weight.to(torch.float32) * factors).to(self.dtype)

    def _groups(self, region: Region, read: ReadRegions) -> torch.Tensor:
        width = 2 * self.shape[-1]
        (*outer, at), (*extents, length) = region
        first, last = at // width, -(-(at + length) // width)
        groups = [*outer, first], [*extents, last - first]
        packed = [*groups[0], 0], [*groups[1], width // 2]
        pairs, exponents = read({self.key: packed, self.scale: groups})
        values = torch.tensor([*_FLOAT4, *(-value for value in _FLOAT4)], dtype=self.dtype, device="cpu")
        both = torch.stack([pairs & 0x0F, pairs >> 4], dim=-1).flatten(-2)
        exponents = exponents.to(torch.int32) - _EXPONENT_OF_ONE
        numbers = torch.ldexp(values[both.long()], exponents.unsqueeze(-1)).to(self.dtype)
        return numbers.flatten(-2).narrow(-1, at - first * width, length)


@dataclass(frozen=True)
class RegionReader:
    """Reads boxes of stored tensors by plans: a ``ReadRegions``.

    Attributes:
        metadata: What the files hold, as it is stored.
        read: Carries out a plan.
    """

    metadata: Metadata
    read: ReadPlan

    def __call__(self, regions: dict[str, Region]) -> Sequence[torch.Tensor]:
        """The boxes."""
        for key, region in regions.items():
            self._check(key, *region, needed_by=next(iter(regions)))
        boxes = [(key, Box(*map(tuple, region))) for key, region in regions.items()]
        planner = BoxPlanner(self.metadata, boxes)
        self.read(planner.plan, planner)
        return planner.tensors

    def stored(self, key: str) -> TensorStorageMetadata:
        """What the files have under a key."""
        entry = self.metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        return entry

    def _check(self, key: str, offsets: Sequence[int], lengths: Sequence[int], needed_by: str) -> None:
        stored = self.stored(key)
        if [chunk.sizes for chunk in stored.chunks] != [stored.size]:
            raise InvalidPlanError(f"{key}: quantised tensors must lie in one file each", key=key)
        ends = [at + length for at, length in zip(offsets, lengths, strict=True)]
        if len(ends) != len(stored.size) or any(map(int.__gt__, ends, stored.size)):
            raise InvalidPlanError(
                f"{key} of shape {tuple(stored.size)} has no elements up to {tuple(ends)}, which {needed_by} "
                "needs. Is block_size the one that the model was quantised with?",
                key=key,
            )


def show_numbers(metadata: Metadata, scales: dict[str, str], dtype: torch.dtype) -> Metadata:
    """The metadata of a model as if its quantised tensors were stored as the numbers that they stand for."""
    entries, places = dict(metadata.state_dict_metadata), dict(metadata.storage_data)
    for key in scales:
        stored = entries[key]
        assert isinstance(stored, TensorStorageMetadata)
        size = shape_of_numbers(key, stored.size)
        zeros = torch.Size([0] * len(size))
        properties = type(stored.properties)(dtype=dtype)
        entries[key] = TensorStorageMetadata(properties, size, [ChunkStorageMetadata(zeros, size)])
        places[MetadataIndex(key, zeros)] = places.pop(MetadataIndex(key, stored.chunks[0].offsets))
    return Metadata(entries, None, places, metadata.storage_meta, metadata.version)
