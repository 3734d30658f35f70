"""Which ranks hold the same chunks of a sharded tensor as this one."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from holdfast._tensors.dtensors import held_pieces, memory_of_piece

__all__ = ["ReplicaRanks", "named_chunks"]


class ReplicaRanks:
    """Which ranks hold the same chunks. A mesh is asked once: torch 2.13 takes some 50 us for it."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[Any, ...]], tuple[int, ...]] = {}

    def of(self, value: Any) -> tuple[int, ...]:
        """The ranks, of all that there are, that hold the same chunks of a sharded tensor as this one.

        As far as its mesh tells: of ShardedTensors, and by a rank outside of the mesh, nothing is known.
        """
        if not isinstance(value, DTensor) or Replicate() not in value.placements:
            return ()
        asked = (id(value.device_mesh), value.placements)
        if asked not in self._known:
            self._known[asked] = _same_in_mesh(value)
        return self._known[asked]


def _same_in_mesh(value: DTensor) -> tuple[int, ...]:
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    same = tuple(
        slice(None) if type(placement) is Replicate else at
        for placement, at in zip(value.placements, coordinate, strict=True)
    )
    return tuple(mesh.mesh[same].flatten().tolist())


def named_chunks(key: str, value: DTensor) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's chunks of a tensor, each with key and box in words: ``weight[0:4, 0:8]``."""
    for piece in held_pieces(value):
        box = ", ".join(f"{a}:{a + length}" for a, length in zip(piece.offsets, piece.lengths, strict=True))
        yield f"{key}[{box}]", memory_of_piece(value, piece)
