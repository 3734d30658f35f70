"""Tensors of every kind as chunks: which boxes of which tensor this rank holds, and their memory.

A rank that holds no element of a sharded tensor, because its shard is empty or because it is outside of the
mesh, has no chunk of it. A sharded tensor that has no elements at all is one empty chunk on each rank that is
part of it, so that its name and shape are saved.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.tensor import DTensor

from holdfast._tensors.checkpointable import (
    describes_itself,
    has_methods,
    held_boxes,
    held_shards,
    memory_of_box,
    starts_in,
    whole_shape,
)
from holdfast._tensors.dtensors import local_tensor, memory_of_piece, narrowed, with_local_memory
from holdfast._tensors.host import has_its_memory
from holdfast._tensors.layout_table import Layout, LayoutTable
from holdfast.errors import PlanError
from holdfast.metadata import ChunkStorageMetadata, MetadataIndex

# The exact classes of nearly all tensors: isinstance, asked of 100,000, would take longer than all the rest.
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def is_tensor(value: Any) -> bool:
    """Whether a value is stored as a tensor: elements in chunks, loaded in place.

    Sparse and quantized tensors are more than their elements. They are stored as objects, whole. A value of
    another class that says itself which chunks it holds is stored as a tensor.
    """
    kind = type(value)
    if kind not in PLAIN_TYPES:
        if isinstance(value, ShardedTensor) or has_methods(kind):
            return True
        if not isinstance(value, torch.Tensor):
            return False
    return value.layout is torch.strided and not value.is_quantized and not value.is_nested


def is_any_tensor(value: Any) -> bool:
    """Whether a value is a tensor of any kind, however it is stored."""
    return isinstance(value, torch.Tensor) or has_methods(type(value))


def is_sharded(value: Any) -> bool:
    """Whether ranks may hold different chunks of the tensor."""
    kind = type(value)
    return kind not in PLAIN_TYPES and (isinstance(value, DTensor | ShardedTensor) or has_methods(kind))


def refuse_unsavable(key: str, value: Any) -> None:
    """Raise if a tensor's bytes alone would not bring it back.

    Raises:
        PlanError: It is a subclass that we cannot rebuild, has no data, is an unreduced partial sum, or has
            a layout that cannot be described as boxes.
    """
    if type(value) in PLAIN_TYPES:
        _refuse_without_data(key, value)
        return
    if not is_sharded(value):
        raise PlanError(
            f"{key}: a tensor of the class {type(value).__module__}.{type(value).__qualname__} cannot be "
            "rebuilt from its elements; save a plain tensor, such as value.as_subclass(torch.Tensor), or "
            "give the class __tensor_flatten__ and __tensor_unflatten__",
            key=key,
        )
    refuse_undescribable(key, value)
    dtype = dtype_of(value)
    for part in local_parts(value):
        _refuse_without_data(key, part)
        if not is_plain_part(part, dtype):
            raise PlanError(
                f"{key}: this rank's part of a {type(value).__name__} of {dtype} is a tensor of "
                f"{part.dtype}, {part.layout} and the class {type(part).__module__}."
                f"{type(part).__qualname__}, which cannot be rebuilt from its elements; make it plain first",
                key=key,
            )


def _refuse_without_data(key: str, part: torch.Tensor) -> None:
    if part.is_meta:
        raise PlanError(f"{key}: a tensor on the meta device has no data to save", key=key)
    if not has_its_memory(part):
        raise PlanError(f"{key}: a tensor whose storage was freed or resized has no data to save", key=key)


def refuse_undescribable(key: str, value: Any, layouts: LayoutTable | None = None) -> None:
    """Raise if it cannot be known which elements of a tensor this rank holds.

    Raises:
        PlanError: It is an unreduced partial sum, or its layout cannot be described as boxes.
    """
    try:
        local_chunks(value, layouts)
    except PlanError as error:
        raise PlanError(f"{key}: {error}", key=key, expected=error.expected, found=error.found) from None


def is_plain_part(value: Any, dtype: torch.dtype) -> bool:
    """Whether a tensor has memory, and its elements, of this dtype, are all that there is to it."""
    return (
        type(value) in PLAIN_TYPES
        and value.layout is torch.strided
        and value.dtype is dtype
        and not value.is_meta
        and not value.is_quantized
        and not value.is_nested
        and has_its_memory(value)
    )


def local_parts(value: Any) -> list[torch.Tensor]:
    """The plain tensors that hold this rank's elements of a tensor of any kind."""
    if type(value) not in PLAIN_TYPES and describes_itself(value):
        return held_shards(value)
    if isinstance(value, DTensor):
        return [local_tensor(value)] if value.device_mesh.get_coordinate() is not None else []
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value]


def global_shape(value: Any) -> torch.Size:
    """The shape of the whole tensor, over all ranks."""
    if not isinstance(value, torch.Tensor) or has_methods(type(value)):
        return whole_shape(value)
    # Whatever else is asked of a ShardedTensor, torch answers with a warning.
    shape: torch.Size = value.metadata().size if isinstance(value, ShardedTensor) else value.size()
    return shape


def dtype_of(value: Any) -> torch.dtype:
    """The dtype of a tensor of any kind."""
    dtype: torch.dtype
    dtype = value.metadata().tensor_properties.dtype if isinstance(value, ShardedTensor) else value.dtype
    return dtype


def local_chunks(value: Any, layouts: LayoutTable | None = None) -> Sequence[ChunkStorageMetadata]:
    """The boxes of the tensor that this rank holds: no two overlap, and none that has no elements.

    Args:
        value: A tensor of any kind.
        layouts: The layouts that are known already. Who asks for many tensors passes the same table.

    Raises:
        PlanError: They cannot be known, as ``refuse_undescribable`` would say with the key.
    """
    if is_sharded(value):
        if describes_itself(value):
            return held_boxes(value)
        if isinstance(value, DTensor):
            return _layout_of(value, layouts).chunks
        shards = _full_shards(value)
        if shards or not value.local_shards() or 0 not in global_shape(value):
            return [
                ChunkStorageMetadata(torch.Size(shard.metadata.shard_offsets), shard.tensor.shape)
                for shard in shards
            ]
    size = global_shape(value)
    return [ChunkStorageMetadata(_zeros(len(size)), size)]


def _layout_of(value: DTensor, layouts: LayoutTable | None) -> Layout:
    return (LayoutTable() if layouts is None else layouts).of(value)


def _full_shards(value: ShardedTensor) -> list[LocalShard]:
    """This rank's shards that have elements."""
    shards = value.local_shards()
    for shard in shards:
        if shard.tensor.shape != tuple(shard.metadata.shard_sizes):
            raise PlanError(
                f"a ShardedTensor's shard at {tuple(shard.metadata.shard_offsets)} should have the shape "
                f"{tuple(shard.metadata.shard_sizes)}, and has {tuple(shard.tensor.shape)}",
                expected=tuple(shard.metadata.shard_sizes),
                found=tuple(shard.tensor.shape),
            )
    return [shard for shard in shards if shard.tensor.numel()]


@functools.cache
def _zeros(ndim: int) -> torch.Size:
    return torch.Size([0] * ndim)


def _memory_of_chunk(value: Any, number: int, key: str, layouts: LayoutTable | None) -> torch.Tensor:
    """The memory of one of the boxes of ``local_chunks``."""
    if not is_sharded(value):
        return value  # type: ignore[no-any-return]
    if describes_itself(value):
        memory = memory_of_box(value, key, held_boxes(value)[number])
    elif isinstance(value, DTensor):
        memory = memory_of_piece(value, _layout_of(value, layouts).pieces[number])
    elif shards := _full_shards(value):
        memory = shards[number].tensor
    else:
        memory = value.local_shards()[0].tensor.new_empty(global_shape(value))
    if memory.is_meta:
        raise PlanError(
            f"{key}: a sharded tensor on the meta device has no memory; call to_empty() first", key=key
        )
    return memory


def is_without_memory(value: Any) -> bool:
    """Whether a value is a tensor on the meta device, so that there is nothing to load into."""
    if type(value) in PLAIN_TYPES:
        return bool(value.is_meta)
    if type(value) is DTensor and not local_tensor(value).is_meta:
        return False
    return isinstance(value, torch.Tensor) and any(part.is_meta for part in local_parts(value))


def with_memory(value: Any, device: torch.device) -> Any:
    """A tensor like ``value``, which is on the meta device, with memory for what this rank holds of it.

    Its layout and ``requires_grad`` are those of ``value``, and it is a parameter if ``value`` is one. Its
    elements are not initialized.

    Raises:
        PlanError: It is a ShardedTensor or of a class that we cannot make.
    """
    if isinstance(value, DTensor) and not describes_itself(value):
        return with_local_memory(value, device)
    if type(value) in PLAIN_TYPES:
        made = torch.empty_like(value, device=device, requires_grad=value.requires_grad)
        is_parameter = isinstance(value, torch.nn.Parameter)
        return torch.nn.Parameter(made, requires_grad=value.requires_grad) if is_parameter else made
    raise PlanError(f"a {type(value).__name__} on the meta device cannot be given memory; make it first")


def find_chunk(value: Any, index: MetadataIndex, layouts: LayoutTable | None = None) -> torch.Tensor:
    """The memory of the local chunk that ``index`` names by its offset.

    An index without an offset names the only chunk. The index's hint is not looked at: after planning it
    counts the chunks of all ranks. ``layouts`` is as for ``local_chunks``.

    Raises:
        PlanError: This rank holds no such chunk, or a sharded tensor is on the meta device, where all that
            is copied into it would be lost silently.
    """
    offset = index.offset
    if type(value) in PLAIN_TYPES and not (offset and any(offset)):
        return value  # type: ignore[no-any-return]
    chunks = local_chunks(value, layouts)
    for number, chunk in enumerate(chunks):
        if chunk.offsets == offset or (offset is None and len(chunks) == 1):
            return _memory_of_chunk(value, number, index.fqn, layouts)
    wanted = "the only one" if offset is None else f"one that begins at {tuple(offset)}"
    held = [tuple(chunk.offsets) for chunk in chunks]
    raise PlanError(
        f"{index.fqn}: this rank holds the chunks that begin at {held}, and {wanted} was asked for",
        key=index.fqn,
    )


def find_box(
    value: Any, key: str, box: ChunkStorageMetadata, layouts: LayoutTable | None = None
) -> torch.Tensor:
    """The memory of a box that lies within one local chunk: the chunk, or a view of a part of it.

    Args:
        value: A tensor of any kind.
        key: Its key, for messages.
        box: The box.
        layouts: As for ``local_chunks``.

    Raises:
        PlanError: No chunk of this rank contains the whole box, or a sharded tensor is on the meta device.
    """
    layout = layouts.of_plain(value, value.dtype) if layouts is not None and type(value) is DTensor else None
    chunks = local_chunks(value, layouts) if layout is None else layout.chunks
    if len(chunks) == 1 and chunks[0].sizes == box.sizes and chunks[0].offsets == box.offsets:
        # Nearly always a rank has one chunk, and the box is all of it.
        if layout is not None and not (memory := memory_of_piece(value, layout.pieces[0])).is_meta:
            return memory
        return _memory_of_chunk(value, 0, key, layouts)
    for number, chunk in enumerate(chunks):
        starts = starts_in(chunk, box)
        if starts is not None:
            return narrowed(_memory_of_chunk(value, number, key, layouts), starts, box.sizes)
    if is_sharded(value) and describes_itself(value):
        # It may write other boxes than those that it loads into.
        return memory_of_box(value, key, box)
    held = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
    raise PlanError(
        f"{key}: a box at {tuple(box.offsets)} of sizes {tuple(box.sizes)} was asked for, and none of this "
        f"rank's chunks has it: {held}",
        key=key,
    )
