"""DTensors as boxes: which parts of the whole this rank holds, and where they lie in its local tensor."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # FSDP2 over tensor parallelism uses it

from holdfast._tensors.mesh_layout import Cut, HeldRuns, Piece, pieces_of, read_layout
from holdfast.errors import PlanError


class PartOfShard(DTensor):
    """A DTensor that is given the boxes that this rank holds. Its placements tell only who holds the same.

    Attributes:
        pieces: The boxes that this rank holds.
    """

    pieces: tuple[Piece, ...]


def divided_as(local: torch.Tensor, spec: Any, pieces: tuple[Piece, ...]) -> PartOfShard:
    """A tensor of which this rank holds certain boxes, around the memory of ``local``."""
    made: Any = PartOfShard(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    made.pieces = pieces
    return made  # type: ignore[no-any-return]


def held_pieces(value: DTensor) -> tuple[Piece, ...]:
    """The boxes of ``value`` that this rank holds.

    None if this rank is outside of the mesh, or if its shard is empty. A tensor without elements is one empty
    box on every rank of its mesh: some rank must say that it exists.

    Raises:
        PlanError: The placements hold partial sums, are of a kind that we do not know, or do not agree with
            the shape of the local tensor. The message does not know the key.
    """
    if isinstance(value, PartOfShard):
        return value.pieces
    mesh = value.device_mesh
    cuts = cuts_of(value)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    shape = tuple(value.shape)
    readings = read_layout(shape, tuple(mesh.shape), tuple(coordinate), cuts, _unusual_order(value))
    reading = _choose(value, readings)
    if 0 in shape:
        nowhere = (0,) * len(shape)
        return (Piece(nowhere, shape, nowhere),)
    return pieces_of(reading)


def cuts_of(value: DTensor) -> tuple[Cut | None, ...]:
    """How each dimension of the mesh cuts the tensor; None where it replicates.

    Raises:
        PlanError: As ``held_pieces``.
    """
    cuts: list[Cut | None] = []
    ndim = value.dim()
    for placement in value.placements:
        # The exact class: a subclass may divide in a way of its own. Before torch 2.10 a strided shard was a
        # subclass, equal to the plain one.
        kind = type(placement)
        if kind is Replicate:
            cuts.append(None)
            continue
        if kind is not Shard and kind is not _StridedShard:
            raise _unknown(value, placement)
        if not -ndim <= placement.dim < ndim:  # type: ignore[attr-defined]
            raise PlanError(f"{_described(value)} cannot be: {placement} shards a dimension that it has not")
        factor = 1 if kind is Shard else int(placement.split_factor)  # type: ignore[attr-defined]
        cuts.append(Cut(placement.dim % ndim, factor))  # type: ignore[attr-defined]
    return tuple(cuts)


def _unknown(value: DTensor, placement: object) -> PlanError:
    if isinstance(placement, Partial):
        return PlanError(
            f"{_described(value)} holds partial sums; reduce it first, for example with "
            "redistribute(placements=[Replicate()])"
        )
    return PlanError(
        f"{_described(value)} has a placement of the class {type(placement).__module__}."
        f"{type(placement).__qualname__}, and which elements that gives to which rank is not known here; "
        "redistribute it to Shard and Replicate first"
    )


def _unusual_order(value: DTensor) -> tuple[int, ...] | None:
    """The mesh dimensions in the order of their cuts, if torch (from 2.10) recorded an unusual order."""
    entries = vars(value._spec).get("shard_order") or ()  # noqa: SLF001 - torch offers it nowhere else
    if all(len(entry.mesh_dims) < 2 or _rises(entry.mesh_dims) for entry in entries):
        return None
    return tuple(mesh_dim for entry in entries for mesh_dim in entry.mesh_dims)


def _rises(numbers: Sequence[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))


def _choose(value: DTensor, readings: Sequence[HeldRuns]) -> HeldRuns:
    """The only one of the readings that agrees with the local tensor; raises PlanError if none or two do."""
    local = local_tensor(value)
    if len(readings) == 1 and readings[0].shape == local.shape:
        return readings[0]
    empty = local.numel() == 0
    # What holds nothing has no place: any shape without elements is as good as another.
    fitting = [
        reading for reading in readings if reading.shape == local.shape or (empty and not pieces_of(reading))
    ]
    if len(fitting) == 1 or (fitting and empty):
        return fitting[0]
    if fitting:
        raise PlanError(
            f"{_described(value)} is divided unevenly in a way that has two meanings, and the local shape "
            f"{tuple(local.shape)} fits both; redistribute it to Shard and Replicate, or pad it to a size "
            "that divides evenly"
        )
    shapes = " or ".join(str(reading.shape) for reading in readings)
    raise PlanError(
        f"{_described(value)} should have the local shape {shapes} on this rank, and has "
        f"{tuple(local.shape)}; which elements those are cannot be known",
        expected=readings[0].shape,
        found=tuple(local.shape),
    )


def _described(value: DTensor) -> str:
    placements = ", ".join(repr(placement) for placement in value.placements)
    return (
        f"a DTensor of shape {tuple(value.shape)} with the placements ({placements}) over a mesh of shape "
        f"{tuple(value.device_mesh.shape)}"
    )


def local_tensor(value: DTensor) -> torch.Tensor:
    """This rank's own memory of ``value``, outside of autograd. Waits for a collective that fills it."""
    # to_local() takes 6 us and builds a node of autograd, which then refuses to be written to.
    local = value._local_tensor  # noqa: SLF001
    if isinstance(local, AsyncCollectiveTensor):
        received: torch.Tensor = local.wait()
        return received
    return local


def own_part(value: torch.Tensor) -> torch.Tensor:
    """This rank's own memory of a DTensor; any other tensor as it is."""
    return local_tensor(value) if isinstance(value, DTensor) else value


def memory_of_piece(value: DTensor, piece: Piece) -> torch.Tensor:
    """The memory of one of the boxes of ``held_pieces``: the local tensor, or a view of it."""
    local = local_tensor(value).detach()
    if local.shape != piece.lengths and 0 in piece.lengths:
        return local.new_empty(piece.lengths)
    return narrowed(local, piece.starts, piece.lengths)


def narrowed(tensor: torch.Tensor, starts: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """A view of a box of a tensor; the tensor itself if the box is all of it."""
    if tensor.shape == lengths:
        return tensor
    for dim, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        # Some tensor subclasses can be cut in one dimension only.
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor


def around(value: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor with the layout of ``value`` and other local memory. It does not require a gradient."""
    # from_local takes 10 times as long, and fails on a rank outside of the mesh.
    spec = value._spec  # noqa: SLF001
    if isinstance(value, PartOfShard):
        return divided_as(local, spec, value.pieces)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def empty_shards(value: DTensor, device: torch.device, dtype: torch.dtype | None = None) -> DTensor:
    """A DTensor with the layout of ``value`` and new, uninitialized memory for this rank's part."""
    return DTensor.from_local(
        torch.empty_like(local_tensor(value).detach(), dtype=dtype, device=device),
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def with_local_memory(value: DTensor, device: torch.device) -> DTensor:
    """A copy of the tensor with new, uninitialized memory for this rank's part; a parameter if it was one."""
    if isinstance(value, PartOfShard):
        return around(value, torch.empty_like(local_tensor(value).detach(), device=device))
    made = empty_shards(value, device)
    if isinstance(value, torch.nn.Parameter):
        parameter: Any = torch.nn.Parameter(made, requires_grad=value.requires_grad)
        return parameter  # type: ignore[no-any-return]
    return made.requires_grad_(value.requires_grad)  # type: ignore[return-value]
