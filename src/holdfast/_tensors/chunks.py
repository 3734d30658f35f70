"""Tensors of every kind as chunks: which boxes of which tensor this rank holds, and their memory."""

import functools
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from holdfast.errors import PlanError
from holdfast.metadata import ChunkStorageMetadata, MetadataIndex

__all__ = [
    "find_chunk",
    "global_shape",
    "is_any_tensor",
    "is_sharded",
    "is_tensor",
    "local_chunks",
    "refuse_unsavable",
]

_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}
if hasattr(torch.nn, "Buffer"):
    _PLAIN_TYPES.add(torch.nn.Buffer)


def is_tensor(value: Any) -> bool:
    """Whether a value is stored as a tensor: elements in chunks, loaded in place.

    Sparse and quantized tensors are more than their elements. They are stored as objects, whole.
    """
    if type(value) in _PLAIN_TYPES:
        return value.layout is torch.strided and not value.is_quantized and not value.is_nested
    if isinstance(value, ShardedTensor):
        return True
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_nested
    )


def is_any_tensor(value: Any) -> bool:
    """Whether a value is a tensor of any kind, however it is stored."""
    return isinstance(value, torch.Tensor)


def is_sharded(value: Any) -> bool:
    """Whether ranks hold different chunks of the tensor."""
    return type(value) not in _PLAIN_TYPES and isinstance(value, DTensor | ShardedTensor)


def refuse_unsavable(key: str, value: Any) -> None:
    """Raise if a tensor's bytes alone would not bring it back.

    Raises:
        PlanError: It is a subclass that we cannot rebuild, has no data, or is an unreduced partial sum.
    """
    if type(value) in _PLAIN_TYPES:
        if value.is_meta:
            raise PlanError(f"{key}: a tensor on the meta device has no data to save", key=key)
        return
    if isinstance(value, DTensor):
        if any(isinstance(placement, Partial) for placement in value.placements):
            raise PlanError(
                f"{key}: a DTensor with the placements {value.placements} holds partial sums; reduce it "
                "first, for example with redistribute(placements=[Replicate()])",
                key=key,
            )
        return
    if not isinstance(value, ShardedTensor):
        raise PlanError(
            f"{key}: a tensor of the class {type(value).__module__}.{type(value).__qualname__} cannot be "
            "rebuilt from its elements; save a plain tensor, such as value.as_subclass(torch.Tensor)",
            key=key,
        )


def global_shape(value: Any) -> torch.Size:
    """The shape of the whole tensor, over all ranks."""
    shape: torch.Size = value.size()
    return shape


def local_chunks(value: Any) -> list[ChunkStorageMetadata]:
    """The boxes of the tensor that this rank holds; none if it is not part of the tensor's mesh."""
    if type(value) in _PLAIN_TYPES:
        size = value.size()
        return [ChunkStorageMetadata(_zeros(len(size)), size)]
    if isinstance(value, DTensor):
        if value.device_mesh.get_coordinate() is None:
            return []
        sizes, offsets = compute_local_shape_and_global_offset(
            value.shape, value.device_mesh, value.placements
        )
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))]
    if isinstance(value, ShardedTensor):
        return [
            ChunkStorageMetadata(
                torch.Size(shard.metadata.shard_offsets), torch.Size(shard.metadata.shard_sizes)
            )
            for shard in value.local_shards()
        ]
    return [ChunkStorageMetadata(_zeros(value.dim()), value.size())]


@functools.cache
def _zeros(ndim: int) -> torch.Size:
    return torch.Size([0] * ndim)


def find_chunk(value: Any, index: MetadataIndex) -> torch.Tensor:
    """The memory of the local chunk that ``index`` names.

    Raises:
        PlanError: This rank holds no such chunk.
    """
    if type(value) in _PLAIN_TYPES and not (index.offset and any(index.offset)):
        return value  # type: ignore[no-any-return]
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        hint = index.index
        if hint is not None and hint < len(shards):
            shards = [shards[hint], *shards]
        for shard in shards:
            if index.offset is None or torch.Size(shard.metadata.shard_offsets) == index.offset:
                return shard.tensor
        raise PlanError(
            f"{index.fqn}: this rank holds no shard that begins at {tuple(index.offset or ())}",
            key=index.fqn,
        )
    if index.offset is not None and any(index.offset):
        raise PlanError(
            f"{index.fqn}: a chunk at {tuple(index.offset)} of a tensor that is not sharded was asked for",
            key=index.fqn,
        )
    assert isinstance(value, torch.Tensor)
    return value
