"""The lines of plans: what a rank could write of a value, and what it must read to fill one."""

from typing import Any

import torch

from holdfast._geometry import Box, cover_of, intersect
from holdfast._tensors.chunks import is_sharded, is_tensor, local_chunks, refuse_unsavable
from holdfast.errors import InvalidPlanError
from holdfast.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from holdfast.planner import (
    BytesIOWriteData,
    LoadItemType,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

__all__ = ["read_items_for_object", "read_items_for_tensor", "write_items"]

_LARGE = 1 << 20
_NOWHERE = torch.Size([0])


def write_items(key: str, value: Any) -> list[WriteItem]:
    """What this rank could write under ``key``.

    Raises:
        PlanError: The value cannot be saved exactly.
    """
    if type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized:
        return _write_plain(key, value)
    if not is_tensor(value):
        return [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, _known_size(value))]
    refuse_unsavable(key, value)
    kind = WriteItemType.SHARD if is_sharded(value) else WriteItemType.TENSOR
    chunks = local_chunks(value)
    if not chunks:
        return []
    properties = _properties_of(value)
    size = value.size()
    # A tensor that is not sharded has one chunk, and this is it: the hint need not be found later.
    hint = 0 if kind is WriteItemType.TENSOR else None
    return [
        WriteItem(
            MetadataIndex(key, chunk.offsets, hint), kind, None, TensorWriteData(chunk, properties, size)
        )
        for chunk in chunks
    ]


def _known_size(value: Any) -> BytesIOWriteData | None:
    """The size of bytes, where it matters how they are written; of other values it is not known yet."""
    is_large = isinstance(value, bytes | bytearray) and len(value) >= _LARGE
    return BytesIOWriteData(len(value)) if is_large else None


def _write_plain(key: str, value: torch.Tensor) -> list[WriteItem]:
    """The same in fewer steps for what most values are; a state may have 100,000 of them."""
    refuse_unsavable(key, value)
    (chunk,) = local_chunks(value)
    data = TensorWriteData(chunk, _properties_of(value), chunk.sizes)
    return [WriteItem(MetadataIndex(key, chunk.offsets, 0), WriteItemType.TENSOR, None, data)]


def _properties_of(value: Any) -> TensorProperties:
    if isinstance(value, torch.Tensor):
        # Whether memory is pinned is deprecated knowledge, and asking costs a call into the runtime.
        return TensorProperties(value.dtype, value.layout, value.requires_grad)
    described = value.metadata().tensor_properties
    return TensorProperties(
        described.dtype,
        described.layout,
        described.requires_grad,
        described.memory_format,
        described.pin_memory,
    )


def read_items_for_object(key: str) -> list[ReadItem]:
    """The one line that reads a value which is not a tensor."""
    index = MetadataIndex(key)
    return [ReadItem(LoadItemType.BYTE_IO, index, _NOWHERE, index, _NOWHERE, _NOWHERE)]


def read_items_for_tensor(key: str, stored: TensorStorageMetadata, value: Any) -> list[ReadItem]:
    """The boxes of stored chunks that together fill what this rank holds of ``value``.

    Raises:
        InvalidPlanError: The stored chunks leave an element of it unwritten.
    """
    chunks = stored.chunks
    if len(chunks) == 1 and chunks[0].sizes == stored.size and type(value) is torch.Tensor:
        # One chunk, wanted as it was stored: the same name and the same zeros on both sides.
        zeros = chunks[0].offsets
        index = MetadataIndex(key, zeros, 0)
        return [ReadItem(LoadItemType.TENSOR, index, zeros, index, zeros, stored.size)]
    items: list[ReadItem] = []
    for number, wanted in enumerate(local_chunks(value)):
        items += _fill_chunk(key, stored, wanted, number)
    return items


def _fill_chunk(
    key: str, stored: TensorStorageMetadata, wanted: ChunkStorageMetadata, number: int
) -> list[ReadItem]:
    box = Box(tuple(wanted.offsets), tuple(wanted.sizes))
    dest = MetadataIndex(key, wanted.offsets, number)
    items, covered = [], []
    for position, chunk in enumerate(stored.chunks):
        both = intersect(box, Box(tuple(chunk.offsets), tuple(chunk.sizes)))
        if both is None:
            continue
        in_dest = tuple(a - b for a, b in zip(both.offsets, box.offsets, strict=True))
        in_chunk = tuple(a - b for a, b in zip(both.offsets, chunk.offsets, strict=True))
        covered.append(Box(in_dest, both.lengths))
        items.append(
            ReadItem(
                LoadItemType.TENSOR,
                dest,
                torch.Size(in_dest),
                MetadataIndex(key, chunk.offsets, position),
                torch.Size(in_chunk),
                torch.Size(both.lengths),
            )
        )
    hole = cover_of(box.lengths, covered)
    if hole is not None:
        start = tuple(a + b for a, b in zip(hole.offsets, box.offsets, strict=True))
        raise InvalidPlanError(
            f"{key}: no chunk of the checkpoint holds the elements from {start} with lengths {hole.lengths}; "
            "the checkpoint is incomplete, and loading it would leave them as they are",
            key=key,
        )
    return items
