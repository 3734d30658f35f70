"""The items of plans, one tensor or value at a time, under the names of torch's module.

The default planners work on columns instead; these are for planners that make records themselves.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from holdfast._names_elsewhere import names_of
from holdfast._plan.local_plan import plan_local_save
from holdfast._plan.metadata_entries import directory_of
from holdfast._plan.reshard import fill_chunk
from holdfast._tensors.chunks import is_tensor, is_without_memory, local_chunks
from holdfast._tensors.meta_memory import MetaMemory
from holdfast.errors import PlanError
from holdfast.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast.planner import LoadItemType, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType

__all__ = ["create_read_items_for_chunk_list"]

if not TYPE_CHECKING:
    __getattr__ = names_of(__name__, "metadata", "resharding")


def _create_write_items(fqn: str, object: Any) -> list[WriteItem]:
    """What this rank can write of a value: an item for each chunk of a tensor, or one for another value.

    Raises:
        PlanError: The value cannot be saved exactly.
    """
    return list(plan_local_save({fqn: object}).items())


def _create_write_items_for_dtensor(fqn: str, tensor: DTensor) -> WriteItem:
    """What this rank writes of a DTensor that it holds one box of."""
    return _only(fqn, _create_write_items(fqn, tensor))


def _create_write_item_for_tensor(fqn: str, tensor: torch.Tensor) -> WriteItem:
    """The item of a tensor that is not sharded."""
    return _only(fqn, _create_write_items(fqn, tensor))


def _only(fqn: str, items: list[WriteItem]) -> WriteItem:
    if len(items) != 1:
        raise PlanError(f"{fqn}: this rank holds {len(items)} chunks of it, and one was expected", key=fqn)
    return items[0]


def _create_write_item_for_shard(
    fqn: str, sharded_tensor: ShardedTensor, shard_md: ShardMetadata
) -> WriteItem:
    """The item of one shard of a ShardedTensor, whichever rank holds it."""
    data = _sharded_tensor_metadata(sharded_tensor, shard_md)
    return WriteItem(MetadataIndex(fqn, data.chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _create_write_item_for_bytesio(fqn: str, bytes: Any) -> WriteItem:  # noqa: ARG001
    """The item of a value that is not a tensor."""
    return WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)


def _sharded_tensor_metadata(sharded_tensor: ShardedTensor, shard_md: ShardMetadata) -> TensorWriteData:
    about = sharded_tensor.metadata()
    described = about.tensor_properties
    properties = TensorProperties(
        described.dtype,
        described.layout,
        described.requires_grad,
        described.memory_format,
        described.pin_memory,
    )
    return TensorWriteData(_chunk_for_shard(shard_md), properties, torch.Size(about.size))


def _create_default_metadata_only_plan(state_dict: dict[str, Any]) -> SavePlan:
    """A plan of all that a flat state has, with the shards of ShardedTensors that other ranks hold."""
    items: list[WriteItem] = []
    for fqn, value in state_dict.items():
        if isinstance(value, ShardedTensor):
            shards = value.metadata().shards_metadata
            items += [_create_write_item_for_shard(fqn, value, shard) for shard in shards]
        else:
            items += _create_write_items(fqn, value)
    return SavePlan(items)


def _chunk_for_shard(shard_md: ShardMetadata) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(shard_md.shard_offsets), torch.Size(shard_md.shard_sizes))


def _create_chunk_from_tensor(tensor: torch.Tensor) -> ChunkStorageMetadata:
    """All of a tensor as one chunk."""
    return ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.size())


def _create_chunk_from_dtensor(tensor: DTensor) -> ChunkStorageMetadata:
    """The box of a DTensor that this rank holds."""
    chunks = local_chunks(tensor)
    if len(chunks) != 1:
        raise PlanError(f"this rank holds {len(chunks)} chunks of the DTensor, and one was expected")
    return chunks[0]


def _create_chunk_list(tensor: Any) -> list[ChunkStorageMetadata]:
    """The boxes of a tensor that this rank holds; those without elements are left out.

    Raises:
        PlanError: It is no tensor, or its boxes cannot be known. It is a ValueError.
    """
    if not is_tensor(tensor):
        raise PlanError(f"a {type(tensor).__name__} is no tensor that could have chunks", found=type(tensor))
    return list(local_chunks(tensor))


def _create_read_items(fqn: str, md: STORAGE_TYPES, obj: Any) -> list[ReadItem]:
    """What is read to fill a value of the state.

    Raises:
        PlanError: The checkpoint has a tensor, and the state something else. It is a ValueError.
    """
    if isinstance(md, BytesStorageMetadata):
        index = MetadataIndex(fqn)
        return [_create_read_item_for_byteio(index, 0, index, 0, 0)]
    if not is_tensor(obj):
        raise PlanError(
            f"{fqn}: the checkpoint has a tensor here, the state a value of type {type(obj).__name__}",
            key=fqn,
        )
    return create_read_items_for_chunk_list(fqn, md, _create_chunk_list(obj))


def create_read_items_for_chunk_list(
    fqn: str, checkpoint_md: TensorStorageMetadata, local_chunks: list[ChunkStorageMetadata]
) -> list[ReadItem]:
    """What is read to fill some boxes of a tensor: resharding, for one tensor.

    Elements that no stored chunk has are in no item.

    Args:
        fqn: The tensor's key, here and in the checkpoint.
        checkpoint_md: What the checkpoint has of it.
        local_chunks: The boxes to fill.
    """
    directory = directory_of(Metadata({fqn: checkpoint_md}))
    return [
        box.item(fqn)
        for local, chunk in enumerate(local_chunks)
        for box in fill_chunk(directory, 0, chunk, local)
    ]


def _create_read_item_for_byteio(
    dest_index: MetadataIndex,
    dest_offset: int,
    storage_index: MetadataIndex,
    storage_offset: int,
    length: int,
) -> ReadItem:
    """The item that reads a value that is not a tensor."""
    begins, size = torch.Size([storage_offset]), torch.Size([length])
    return ReadItem(LoadItemType.BYTE_IO, dest_index, torch.Size([dest_offset]), storage_index, begins, size)


def _create_read_item_for_tensor(
    dest_index: MetadataIndex,
    dest_offsets: Sequence[int],
    storage_index: MetadataIndex,
    storage_offsets: Sequence[int],
    lengths: Sequence[int],
) -> ReadItem:
    """The item that reads a box of a stored chunk."""
    begins, size = torch.Size(storage_offsets), torch.Size(lengths)
    return ReadItem(LoadItemType.TENSOR, dest_index, torch.Size(dest_offsets), storage_index, begins, size)


def _compare_save_plans(plan: SavePlan, other_plan: SavePlan) -> bool:
    """Whether two plans write the same items, with the same hints, and are both usable or both not."""
    hints = [[item.index.index for item in one.items] for one in (plan, other_plan)]
    return plan.usable == other_plan.usable and hints[0] == hints[1] and plan.items == other_plan.items


def _contains_usable_plan(delta_plans: list[SavePlan]) -> bool:
    """Whether one of the plans says something else than "as last time"."""
    return any(plan.usable for plan in delta_plans)


def _merge_delta_local_plans(cached_plans: list[SavePlan], delta_plans: list[SavePlan]) -> list[SavePlan]:
    """All ranks' plans: the new ones, and the cached ones of ranks that say "as last time"."""
    return [new if new.usable else cached for cached, new in zip(cached_plans, delta_plans, strict=True)]


def _init_state_dict(state_dict: dict[str, Any]) -> None:
    """Replace the tensors of a nested state that are on the meta device by ones with memory, in place.

    Raises:
        PlanError: One of them is a ShardedTensor.
    """
    memory = MetaMemory(None)

    def with_memory(value: Any) -> Any:
        return memory.give(value) if is_without_memory(value) else value

    _iterate_state_dict(state_dict, with_memory, with_memory, with_memory)


def _iterate_state_dict(
    iter_object: Any,
    dtensor_func: Callable[[Any], Any],
    sharded_tensor_func: Callable[[Any], Any],
    tensor_func: Callable[[Any], Any],
) -> Any:
    """Replace the tensors of a nested state by what the function for their kind returns.

    Dicts are changed in place; lists and tuples are made anew.
    """
    functions = (dtensor_func, sharded_tensor_func, tensor_func)
    if isinstance(iter_object, DTensor):
        return dtensor_func(iter_object)
    if isinstance(iter_object, torch.Tensor):
        is_sharded = isinstance(iter_object, ShardedTensor)
        return sharded_tensor_func(iter_object) if is_sharded else tensor_func(iter_object)
    if isinstance(iter_object, dict):
        for key, value in iter_object.items():
            iter_object[key] = _iterate_state_dict(value, *functions)
    elif isinstance(iter_object, list | tuple):
        entries = [_iterate_state_dict(value, *functions) for value in iter_object]
        return tuple(entries) if isinstance(iter_object, tuple) else entries
    return iter_object
