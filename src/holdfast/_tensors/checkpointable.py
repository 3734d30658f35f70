"""Values that say themselves which chunks of a tensor they hold, by three methods that torch has named.

``__create_write_items__(key, value)`` returns what this rank writes, ``__create_chunk_list__()`` the boxes
that it holds, and ``__get_tensor_shard__(index)`` the memory of one. Their records are torch's or ours.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast._tensors.dtensors import narrowed, own_part
from holdfast._torch_compat.torch_records import to_ours, to_torch
from holdfast.errors import PlanError
from holdfast.metadata import ChunkStorageMetadata, MetadataIndex
from holdfast.planner import WriteItem, WriteItemType

_METHODS = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
# What nearly all tensors are. Asking each several times for methods would take a third of a plan.
_WITHOUT_METHODS = frozenset({torch.Tensor, torch.nn.Parameter, DTensor})


def has_methods(kind: type) -> bool:
    """Whether the values of a class say themselves what they hold. Of a DTensor its part is asked."""
    if kind in _WITHOUT_METHODS or issubclass(kind, DTensor):
        return False
    return all(hasattr(kind, name) for name in _METHODS)


def describes_itself(value: Any) -> bool:
    """Whether a value, or this rank's part of a DTensor, says itself which chunks it holds."""
    return has_methods(type(own_part(value)))


def items_to_write(key: str, value: Any) -> list[WriteItem]:
    """The items that this rank writes of a value that describes itself; empty chunks are left out.

    Raises:
        PlanError: The value gives something else than items of its own key.
    """
    items: list[Any] = to_ours(list(value.__create_write_items__(key, value)))
    for item in items:
        if not isinstance(item, WriteItem) or item.index.fqn != key:
            raise PlanError(
                f"{key}: __create_write_items__ gave {item!r}, which is no item of this key", key=key
            )
        if (item.tensor_data is None) != (item.type is WriteItemType.BYTE_IO):
            raise PlanError(f"{key}: __create_write_items__ gave a {item.type} with other data", key=key)
    return [
        item
        for item in items
        if (data := item.tensor_data) is None or 0 not in data.chunk.sizes or 0 in data.size
    ]


def held_boxes(value: Any) -> list[ChunkStorageMetadata]:
    """The boxes that a value that describes itself holds on this rank, without empty ones."""
    chunks: list[ChunkStorageMetadata] = to_ours(list(value.__create_chunk_list__()))
    return [
        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        for chunk in chunks
        if 0 not in chunk.sizes
    ]


def held_shards(value: Any) -> list[torch.Tensor]:
    """The memory of each of ``held_boxes``."""
    boxes = held_boxes(value)
    # Some values answer only to the key that they were given when they were made.
    key = next((item.index.fqn for item in _items_of(value)), "") if boxes else ""
    return [memory_of_box(value, key, box) for box in boxes]


def whole_shape(value: Any) -> torch.Size:
    """The shape of the whole tensor of which a value that describes itself holds chunks.

    Raises:
        PlanError: It holds nothing on this rank, and has no method ``size``.
    """
    for item in _items_of(value):
        if item.tensor_data is not None:
            return torch.Size(item.tensor_data.size)
    if not hasattr(value, "size"):
        raise PlanError(
            f"a {type(value).__name__} that holds nothing on this rank does not say the shape of the tensor; "
            "give it a method size()"
        )
    return torch.Size(value.size())


def _items_of(value: Any) -> list[WriteItem]:
    """The items of a value under any key: some values name them by a key that they were given before."""
    items: list[WriteItem] = to_ours(list(value.__create_write_items__("", value)))
    return items


def memory_of_box(value: Any, key: str, box: ChunkStorageMetadata) -> torch.Tensor:
    """The memory of a box of a value that describes itself: one that it holds or writes, or a part of one.

    Raises:
        PlanError: What the value gives for it has another shape, or no memory.
    """
    around = next((held for held in held_boxes(value) if starts_in(held, box) is not None), box)
    memory = value.__get_tensor_shard__(to_torch(MetadataIndex(key, around.offsets)))
    if not isinstance(memory, torch.Tensor) or memory.shape != around.sizes:
        found = tuple(memory.shape) if isinstance(memory, torch.Tensor) else type(memory).__name__
        raise PlanError(
            f"{key}: __get_tensor_shard__ gave {found} for the chunk at {tuple(around.offsets)} of "
            f"the shape {tuple(around.sizes)}",
            key=key,
            expected=tuple(around.sizes),
            found=found,
        )
    return narrowed(memory.detach(), starts_in(around, box) or (), box.sizes)


def starts_in(box: ChunkStorageMetadata, part: ChunkStorageMetadata) -> list[int] | None:
    """Where a part of a box begins in it; None if it reaches out of the box."""
    if len(box.sizes) != len(part.sizes):
        return None
    starts = [a - b for a, b in zip(part.offsets, box.offsets, strict=True)]
    room = [a - b for a, b in zip(box.sizes, part.sizes, strict=True)]
    return starts if all(0 <= start <= most for start, most in zip(starts, room, strict=True)) else None


def shards_wrapper(value: Any) -> Any | None:
    """The LocalShardsWrapper of torch that a value is or a DTensor has; None if it is something else."""
    defining = sys.modules.get("torch.distributed.tensor._shards_wrapper")
    inner = own_part(value)
    return inner if defining is not None and type(inner) is defining.LocalShardsWrapper else None


def with_shards(wrapper: Any, shards: Sequence[torch.Tensor]) -> Any:
    """A LocalShardsWrapper like ``wrapper`` around the memory of other shards."""
    return type(wrapper)(list(shards), wrapper.local_offsets())
