"""The boxes of DTensors that this rank holds, worked out once for all tensors of a layout.

A model of thousands of parameters has a dozen layouts. Asking a mesh, reading placements and finding boxes
takes some 30 microseconds; looking up a layout that is known takes one.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast._tensors.dtensors import PartOfShard, held_pieces, local_tensor
from holdfast._tensors.host import has_its_memory
from holdfast._tensors.mesh_layout import Piece
from holdfast.errors import PlanError
from holdfast.metadata import ChunkStorageMetadata


@dataclass(frozen=True, eq=False, slots=True)
class Layout:
    """The boxes that this rank holds of DTensors of one mesh, with the same placements and shapes.

    Attributes:
        mesh: The mesh. It is kept alive, so that no other one gets its id.
        pieces: The boxes that this rank holds, as ``held_pieces`` says.
        chunks: The same boxes, as plans name them.
    """

    mesh: Any
    pieces: tuple[Piece, ...]
    chunks: tuple[ChunkStorageMetadata, ...]


class LayoutTable:
    """The layouts that are met while one plan is made or carried out. Threads may share it."""

    def __init__(self) -> None:
        self._known: dict[Any, Layout] = {}

    def __reduce__(self) -> Any:
        # A copy is empty: planners that have a table are sent to processes that do not have the meshes.
        return LayoutTable, ()

    def of_plain(self, value: Any, dtype: torch.dtype) -> Layout | None:
        """The layout of a DTensor whose part on this rank is contiguous plain memory of a dtype.

        None for every other value, and for a layout that cannot be described.
        """
        if type(value) is not DTensor:
            return None
        local = value._local_tensor  # noqa: SLF001 - as local_tensor does
        if type(local) is not torch.Tensor or local.dtype is not dtype or not local.is_contiguous():
            return None
        if not has_its_memory(local):
            return None
        try:
            return self.of(value)
        except PlanError:
            return None

    def of(self, value: DTensor) -> Layout:
        """The layout of a tensor: the same object for all tensors that have it.

        Raises:
            PlanError: As ``held_pieces``; the message does not know the key.
        """
        spec = value._spec  # noqa: SLF001 - the properties of a DTensor take five times as long
        placements = spec.placements
        what = (
            id(spec.mesh),
            placements,
            # Before torch 2.10 a strided shard is equal to a plain one.
            tuple(map(type, placements)),
            vars(spec).get("shard_order"),
            value.shape,
            local_tensor(value).shape,
            value.pieces if isinstance(value, PartOfShard) else None,
        )
        known = self._known.get(what)
        if known is None:
            pieces, size = held_pieces(value), torch.Size
            chunks = tuple(ChunkStorageMetadata(size(piece.offsets), size(piece.lengths)) for piece in pieces)
            known = self._known[what] = Layout(spec.mesh, pieces, chunks)
        return known
