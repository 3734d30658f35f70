"""Containers that only torch can read: unusual strides, lazy conjugates, other byte orders, transforms."""

import io

import torch

from holdfast._objects.container import refuse_compressed
from holdfast._storage.delivery import Delivery
from holdfast._storage.source import Chunk
from holdfast.errors import IntegrityError

__all__ = ["deliver_loaded"]


def deliver_loaded(content: io.BytesIO, chunk: Chunk, delivery: Delivery) -> None:
    """Let torch read a whole container, under its weights-only rules, and copy the box that is wanted."""
    refuse_compressed(content)
    try:
        tensor = torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:
        raise IntegrityError(
            f"{chunk.place.relative_path}: the item at {chunk.place.offset} cannot be read: {error}",
            path=chunk.place.relative_path,
        ) from error
    found = (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, torch.Tensor) else type(tensor)
    if found != (chunk.shape, chunk.dtype):
        raise IntegrityError(
            f"{chunk.place.relative_path} has at {chunk.place.offset} {found}, where its metadata says "
            f"{(chunk.shape, chunk.dtype)}",
            path=chunk.place.relative_path,
            expected=(chunk.shape, chunk.dtype),
            found=found,
        )
    item = delivery.item
    for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dimension, start, length)
    delivery.put((0,) * tensor.dim(), tensor.detach())
