"""Which elements of a tensor a rank holds under a layout over a mesh: arithmetic on integers, without torch.

A layout cuts dimensions of a tensor, one cut for each dimension of the mesh that shards it. A plain cut gives
each rank one run of the dimension. A strided cut first divides the dimension into ``split_factor`` parts and
gives each rank its share of every part, so that a rank may hold several runs.

torch's own function for this is private, changed its signature and its results between 2.6 and 2.13, and
names one offset where a rank holds several runs.
"""

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Run: TypeAlias = tuple[int, int]
"""Consecutive elements of one dimension: where they begin in the whole dimension, and how many they are."""

Runs: TypeAlias = tuple[Run, ...]
"""All that a rank holds of one dimension, in the order in which its local tensor has it."""


class Cut(NamedTuple):
    """How one dimension of the mesh cuts the tensor.

    Attributes:
        dim: The dimension of the tensor that it cuts, not negative.
        split_factor: Into how many parts the dimension is divided first; 1 for a plain cut.
    """

    dim: int
    split_factor: int = 1


@dataclass(frozen=True)
class HeldRuns:
    """One meaning of a layout: the runs that a rank holds of every dimension.

    Attributes:
        runs: For each dimension of the tensor its runs; none where the rank holds nothing of it.
        shape: The shape of the rank's local tensor.
    """

    runs: tuple[Runs, ...]
    shape: tuple[int, ...]


class Piece(NamedTuple):
    """One box of the whole tensor that is also one box of the local one.

    Attributes:
        offsets: Where it begins in the whole tensor.
        lengths: How long it is in each dimension.
        starts: Where it begins in the local tensor.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    starts: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def read_layout(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    cuts: tuple[Cut | None, ...],
    order: tuple[int, ...] | None = None,
) -> tuple[HeldRuns, ...]:
    """The runs that the rank at ``coordinate`` holds, in every meaning that the layout can have.

    With strided cuts there may be two, which differ only where the tensor does not divide evenly. One is to
    apply the cuts from left to right, as torch does when it distributes a tensor. The other is the order
    that strided cuts stand for: FSDP2 cuts what tensor parallelism has cut already, and writes it down as a
    strided cut to the left of the other. The local tensor's shape tells which it is, except for rare sizes.

    Args:
        shape: The shape of the whole tensor.
        mesh_shape: The shape of the mesh.
        coordinate: The rank's place in the mesh.
        cuts: For each dimension of the mesh how it cuts; None where it replicates.
        order: Dimensions of the mesh in the order of their cuts, where it is not from left to right.

    Returns:
        The meanings, without doubles; at least one.
    """
    mesh_dims = [mesh_dim for mesh_dim, cut in enumerate(cuts) if cut is not None]
    sequences: list[list[tuple[int, Cut]]] = []
    if order is not None:
        sequences.append(_plain(order, cuts))
    else:
        sequences.append([(mesh_dim, cut) for mesh_dim in mesh_dims if (cut := cuts[mesh_dim]) is not None])
        implied = _implied_order(mesh_shape, cuts)
        if implied is not None:
            sequences.append(_plain(implied, cuts))
    readings = (_read(shape, mesh_shape, coordinate, sequence) for sequence in sequences)
    return tuple(dict.fromkeys(readings))


def _plain(order: Sequence[int], cuts: Sequence[Cut | None]) -> list[tuple[int, Cut]]:
    return [(mesh_dim, Cut(cut.dim)) for mesh_dim in order if (cut := cuts[mesh_dim]) is not None]


def _implied_order(mesh_shape: Sequence[int], cuts: Sequence[Cut | None]) -> list[int] | None:
    """The order of plain cuts that strided ones stand for; None if there are none, or no such order.

    The factor of a strided cut is the number of parts that the cuts to its right have made before it.
    """
    if not any(cut is not None and cut.split_factor > 1 for cut in cuts):
        return None
    order: dict[int, list[int]] = {}
    for mesh_dim in reversed(range(len(cuts))):
        cut = cuts[mesh_dim]
        if cut is None:
            continue
        earlier = order.setdefault(cut.dim, [])
        products = itertools.accumulate((mesh_shape[done] for done in earlier), operator.mul, initial=1)
        place = next((n for n, product in enumerate(products) if product == cut.split_factor), None)
        if place is None:
            return None
        earlier.insert(place, mesh_dim)
    return [mesh_dim for of_one_dim in order.values() for mesh_dim in of_one_dim]


def _read(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    sequence: Sequence[tuple[int, Cut]],
) -> HeldRuns:
    runs = [_tidy([(0, length)]) for length in shape]
    for mesh_dim, cut in sequence:
        runs[cut.dim] = _take_share(
            runs[cut.dim], mesh_shape[mesh_dim], coordinate[mesh_dim], cut.split_factor
        )
    return HeldRuns(tuple(runs), tuple(_total(of_dim) for of_dim in runs))


def _take_share(runs: Runs, shares: int, position: int, split_factor: int) -> Runs:
    """Share number ``position`` of every part; parts and shares are as long as those of torch.chunk."""
    total = _total(runs)
    part = -(-total // split_factor)
    taken: list[Run] = []
    for part_start in range(0, total, part or 1):
        length = min(part, total - part_start)
        share = -(-length // shares)
        start = min(position * share, length)
        end = min(start + share, length)
        taken += _slice(runs, part_start + start, part_start + end)
    return _tidy(taken)


def _slice(runs: Runs, start: int, end: int) -> list[Run]:
    """Elements ``start`` to ``end`` of the runs, one after the other."""
    found, passed = [], 0
    for begin, length in runs:
        low, high = max(start - passed, 0), min(end - passed, length)
        if low < high:
            found.append((begin + low, high - low))
        passed += length
    return found


def _tidy(runs: Sequence[Run]) -> Runs:
    """The same elements in as few runs as possible."""
    tidy: list[Run] = []
    for begin, length in runs:
        if length == 0:
            continue
        if tidy and sum(tidy[-1]) == begin:
            tidy[-1] = (tidy[-1][0], tidy[-1][1] + length)
        else:
            tidy.append((begin, length))
    return tuple(tidy)


def _total(runs: Runs) -> int:
    return sum(length for _, length in runs)


@functools.lru_cache(maxsize=4096)
def pieces_of(reading: HeldRuns) -> tuple[Piece, ...]:
    """The boxes that a rank holds, each a box of its local tensor too; none if it holds no element.

    A tensor of no dimensions is one box.
    """
    if not math.prod(reading.shape):
        return ()
    placed = []
    for runs in reading.runs:
        starts = itertools.accumulate((length for _, length in runs), initial=0)
        placed.append([(begin, length, start) for (begin, length), start in zip(runs, starts, strict=False)])
    pieces = []
    for combination in itertools.product(*placed):
        offsets, lengths, starts_of = zip(*combination, strict=True) if combination else ((), (), ())
        pieces.append(Piece(offsets, lengths, starts_of))
    return tuple(pieces)
