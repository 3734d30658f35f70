"""Which ranks hold the same chunks of a sharded tensor as this one."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from holdfast._tensors.chunks import find_chunk, local_chunks
from holdfast.metadata import MetadataIndex

__all__ = ["named_chunks", "replica_ranks"]


def replica_ranks(value: Any) -> tuple[int, ...]:
    """The ranks, of all that there are, that hold the same chunks of a sharded tensor as this one.

    As far as its mesh tells: of ShardedTensors, and by a rank outside of the mesh, nothing is known.
    """
    if not isinstance(value, DTensor) or Replicate() not in value.placements:
        return ()
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    same = tuple(
        slice(None) if type(placement) is Replicate else at
        for placement, at in zip(value.placements, coordinate, strict=True)
    )
    return tuple(mesh.mesh[same].flatten().tolist())


def named_chunks(key: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's chunks of a sharded tensor, each with key and box in words: ``weight[0:4, 0:8]``."""
    for chunk in local_chunks(value):
        box = ", ".join(f"{at}:{at + length}" for at, length in zip(chunk.offsets, chunk.sizes, strict=True))
        yield f"{key}[{box}]", find_chunk(value, MetadataIndex(key, chunk.offsets))
