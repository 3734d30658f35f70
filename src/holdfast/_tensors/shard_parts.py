"""The parts of a divided tensor subclass: which box of which whole a rank's part is."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from holdfast._geometry import row_major_strides
from holdfast._tensors.dtensors import PartOfShard, cuts_of, divided_as
from holdfast._tensors.mesh_layout import Piece
from holdfast.errors import PlanError

_MOST_CHOICES = 256

PartDims: TypeAlias = dict[int, int | None]
"""For each dimension in which a tensor is divided: that in which a part is; None if every rank has all."""


def find_part_dims(
    whole: DTensor, local: torch.Tensor, parts: Mapping[str, torch.Tensor], context: Any
) -> dict[str, PartDims]:
    """How each part of a divided tensor is divided.

    What the class itself does with its parts when a tensor is cut is the answer. A tensor of length 1 cannot
    be cut: one that is twice as long is, to what there was. For a class that cannot be cut, shapes tell: a
    part of as many dimensions is divided alike if its length is the same, a multiple or a fraction, and is on
    every rank if its length is 1.

    Args:
        whole: The divided tensor.
        local: This rank's part of it.
        parts: The parts of ``local``.
        context: What its class keeps besides.

    Raises:
        PlanError: It cannot be known.
    """
    found: dict[str, PartDims] = {name: {} for name in parts}
    for dim in sorted({cut.dim for cut in cuts_of(whole) if cut is not None}):
        if local.shape[dim] == whole.shape[dim]:
            continue
        dims = (
            _dims_by_cutting(local, parts, context, dim)
            or _dims_by_growing(local, parts, context, dim)
            or _dims_by_shape(whole, local, parts, dim)
        )
        for name, part_dim in dims.items():
            if part_dim is not None and part_dim in found[name].values():
                raise PlanError(f"dimension {part_dim} of its part {name} is divided in two ways")
            found[name][dim] = part_dim
    return found


def _dims_by_cutting(
    local: torch.Tensor, parts: Mapping[str, torch.Tensor], context: Any, dim: int
) -> dict[str, int | None] | None:
    """See how the class cuts a tensor like ``local``; None if it cannot, or parts do not shrink alike."""
    length = local.shape[dim]
    for shorter, kept in _cut(local, parts, context, dim):
        if type(shorter) is not type(local) or shorter.shape[dim] != kept:
            continue
        dims: dict[str, int | None] = {}
        for name, part in parts.items():
            cut = getattr(shorter, name)
            changed = [
                number for number, (a, b) in enumerate(zip(part.shape, cut.shape, strict=False)) if a != b
            ]
            if part.dim() != cut.dim() or len(changed) > 1:
                break
            if changed and cut.shape[changed[0]] * length != part.shape[changed[0]] * kept:
                break
            dims[name] = changed[0] if changed else None
        # A class that keeps its parts as they are and notes the cut elsewhere tells nothing.
        if len(dims) == len(parts) and set(dims.values()) != {None}:
            return dims
    return None


def _cut(
    local: torch.Tensor, parts: Mapping[str, torch.Tensor], context: Any, dim: int
) -> Iterator[tuple[torch.Tensor, int]]:
    """Tensors like ``local``, on the meta device, cut to a length; with that length."""
    length = local.shape[dim]
    with contextlib.suppress(Exception):
        empty = {
            name: torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device="meta")
            for name, part in parts.items()
        }
        model = _unflatten(local, empty, context, local.shape)
        # Where a class can be cut depends on the size of its blocks, which is not known.
        shares = [length // share for share in (2, 3, 5, 7)]
        powers = [1 << n for n in reversed(range(length.bit_length()))]
        for kept in dict.fromkeys([*shares, *powers, length - 1]):
            if 0 < kept < length:
                yield from ((shorter, kept) for shorter in _shortened(model, dim, kept))


def _unflatten(
    local: torch.Tensor, parts: Mapping[str, torch.Tensor], context: Any, shape: Any
) -> torch.Tensor:
    made: torch.Tensor = type(local).__tensor_unflatten__(  # type: ignore[attr-defined]
        parts, context, torch.Size(shape), row_major_strides(shape)
    )
    return made


def _shortened(model: torch.Tensor, dim: int, kept: int) -> Iterator[torch.Tensor]:
    """The beginning of a tensor, in each of the ways that its class knows."""
    with contextlib.suppress(Exception):
        yield torch.narrow(model, dim, 0, kept)
    with contextlib.suppress(Exception):
        yield torch.split(model, kept, dim)[0]


def _dims_by_growing(
    local: torch.Tensor, parts: Mapping[str, torch.Tensor], context: Any, dim: int
) -> dict[str, int | None] | None:
    """In which dimensions parts must be twice as long so that half of the tensor has parts like these.

    Of several answers it is the one that divides the most parts; None if there is none, or not one alone.
    """
    wanted = {name: part.shape for name, part in parts.items()}
    shape = [length * (1 + (at == dim)) for at, length in enumerate(local.shape)]
    found: list[dict[str, int | None]] = []
    choices = itertools.product(*([None, *range(part.dim())] for part in parts.values()))
    for choice in itertools.islice(choices, _MOST_CHOICES):
        dims = dict(zip(parts, choice, strict=True))
        with contextlib.suppress(Exception):
            model = _unflatten(local, _doubled(parts, dims), context, shape)
            for half in _shortened(model, dim, local.shape[dim]):
                same = {name: getattr(half, name).shape for name in parts} == wanted
                if same and type(half) is type(local) and list(model.shape) == shape and dims not in found:
                    found.append(dims)
    most = max((_divided_parts(dims) for dims in found), default=0)
    best = [dims for dims in found if _divided_parts(dims) == most]
    return best[0] if most and len(best) == 1 else None


def _doubled(parts: Mapping[str, torch.Tensor], dims: Mapping[str, int | None]) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty(
            [length * (1 + (at == dims[name])) for at, length in enumerate(part.shape)],
            dtype=part.dtype,
            device="meta",
        )
        for name, part in parts.items()
    }


def _divided_parts(dims: Mapping[str, int | None]) -> int:
    return sum(at is not None for at in dims.values())


def _dims_by_shape(
    whole: DTensor, local: torch.Tensor, parts: Mapping[str, torch.Tensor], dim: int
) -> dict[str, int | None]:
    dims: dict[str, int | None] = {}
    length = local.shape[dim]
    for name, part in parts.items():
        here = part.shape[dim] if part.dim() == local.dim() else 0
        if here == length:
            # A length of 1 may mean either. What each rank keeps for itself is not lost.
            dims[name] = dim
        elif here == 1 or part.numel() == 1:
            # Ranks compare what all of them have: if it is not the same, the save is refused.
            dims[name] = None
        elif here and (here % length == 0 or length % here == 0):
            dims[name] = dim
        else:
            raise PlanError(
                f"it is divided over ranks in dimension {dim}, and how its part {name} of shape "
                f"{tuple(part.shape)} is divided cannot be known: this rank has {tuple(local.shape)} of "
                f"{tuple(whole.shape)}"
            )
    return dims


def divide_part(whole: DTensor, part: torch.Tensor, pieces: Sequence[Piece], dims: PartDims) -> PartOfShard:
    """A part of this rank's local tensor as its share of that part of the whole.

    Args:
        whole: The divided tensor.
        part: The part of this rank's local tensor. Its memory is shared.
        pieces: The boxes of ``whole`` that this rank holds.
        dims: How the part is divided, as ``find_part_dims`` says.

    Raises:
        PlanError: The boxes do not fall on elements of the part.
    """
    local_shape = whole._local_tensor.shape  # noqa: SLF001
    ratios = {at: (part.shape[at], local_shape[dim]) for dim, at in dims.items() if at is not None}
    sources = {at: dim for dim, at in dims.items() if at is not None}

    def scaled(numbers: Sequence[int], otherwise: Sequence[int]) -> tuple[int, ...]:
        made = list(otherwise)
        for at, (mine, length) in ratios.items():
            made[at], rest = divmod(numbers[sources[at]] * mine, length)
            if rest:
                raise PlanError(
                    f"it is divided over ranks in dimension {sources[at]}, and its part of shape "
                    f"{tuple(part.shape)} is not divided at the same places: this rank has "
                    f"{tuple(local_shape)} of {tuple(whole.shape)}"
                )
        return tuple(made)

    nowhere = (0,) * part.dim()
    boxes = {
        Piece(
            scaled(piece.offsets, nowhere), scaled(piece.lengths, part.shape), scaled(piece.starts, nowhere)
        )
        for piece in pieces
    }
    return divided_as(
        part,
        _spec(whole, scaled(whole.shape, part.shape), part.dtype, dims),
        tuple(sorted(boxes)),
    )


def nothing_of(whole: DTensor, shape: torch.Size, dtype: torch.dtype) -> PartOfShard:
    """A part of a divided tensor on a rank that holds nothing of it."""
    return divided_as(torch.empty(0, dtype=dtype, device="cpu"), _spec(whole, tuple(shape), dtype, {}), ())


def _spec(whole: DTensor, shape: tuple[int, ...], dtype: torch.dtype, dims: PartDims) -> DTensorSpec:
    """A layout from which it can be told which ranks hold the same; the boxes tell the rest."""
    placements: list[Placement] = []
    for cut in cuts_of(whole):
        is_everywhere = cut is None or dims.get(cut.dim, cut.dim) is None
        placements.append(Replicate() if is_everywhere else Shard(dims.get(cut.dim) or 0))  # type: ignore[union-attr]
    about = TensorMeta(torch.Size(shape), row_major_strides(shape), dtype)
    return DTensorSpec(whole.device_mesh, tuple(placements), tensor_meta=about)
