"""Layouts by name: the ways in which ranks may hold one tensor, and how to make each and compare it."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from tests.support.states import same
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from holdfast.testing import FakeRank

Layout: TypeAlias = Callable[[FakeRank, torch.Tensor], Any]
"""Makes what a rank holds of a whole matrix."""

SHAPE = (7, 5)
WORLD_SIZES = (1, 2, 3, 4, 6)


def strided(dim: int, split_factor: int) -> Placement:
    made: Placement = _StridedShard(dim, split_factor=split_factor)
    return made


def on_mesh(shape: Sequence[int], placements: Sequence[Placement]) -> Layout:
    return lambda rank, whole: rank.distribute(whole, rank.mesh(*shape), placements)


def on_ranks(ranks: Sequence[Any], placements: Sequence[Placement]) -> Layout:
    return lambda rank, whole: rank.distribute(whole, rank.mesh(ranks=ranks), placements)


def plain(rank: FakeRank, whole: torch.Tensor) -> torch.Tensor:
    return whole.clone()


def fsdp_over_tp(data: int, tensor: int) -> Layout:
    """As FSDP2 holds what tensor parallelism has divided already, however the sizes divide."""

    def make(rank: FakeRank, whole: torch.Tensor) -> DTensor:
        mesh = rank.mesh(data, tensor)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        column = _chunk(whole, tensor, coordinate[1])
        local = _chunk(column, data, coordinate[0]).clone()
        return rank.assemble(local, mesh, [strided(0, tensor), Shard(0)], whole.shape)

    return make


def _chunk(tensor: torch.Tensor, count: int, position: int) -> torch.Tensor:
    found = tensor.chunk(count)
    return found[position] if position < len(found) else tensor[:0]


def sharded_rows(rank: FakeRank, whole: torch.Tensor) -> ShardedTensor:
    """FSDP1's even rows, the last ones shorter or missing."""
    rows, columns = whole.shape
    step = -(-rows // rank.world_size)
    starts = [min(step * number, rows) for number in range(rank.world_size)]
    boxes = [[((start, 0), (min(step, rows - start), columns))] for start in starts]
    return rank.sharded_tensor(whole, [[box for box in of_rank if box[1][0]] for of_rank in boxes])


def sharded_mosaic(rank: FakeRank, whole: torch.Tensor) -> ShardedTensor:
    """Several shards a rank, of several sizes, dealt out from the last rank on."""
    rows, columns = whole.shape
    tiles: list[tuple[tuple[int, int], tuple[int, int]]] = [
        ((0, 0), (2, 3)),
        ((0, 3), (2, columns - 3)),
        ((2, 0), (1, columns)),
        ((3, 0), (rows - 3, 1)),
        ((3, 1), (rows - 3, columns - 1)),
    ]
    boxes: list[list[tuple[tuple[int, int], tuple[int, int]]]] = [[] for _ in range(rank.world_size)]
    for number, tile in enumerate(tiles):
        boxes[-1 - number % rank.world_size].append(tile)
    return rank.sharded_tensor(whole, boxes)


def layouts_of(world_size: int) -> dict[str, Layout]:
    """Every kind of layout that so many ranks can have of one matrix."""
    everyone = list(range(world_size))
    found: dict[str, Layout] = {
        "plain": plain,
        "R": on_mesh([world_size], [Replicate()]),
        "S0": on_mesh([world_size], [Shard(0)]),
        "S-1": on_mesh([world_size], [Shard(-1)]),
        "strided alone": on_mesh([world_size], [strided(0, 2)]),
        "reversed ranks": on_ranks(everyone[::-1], [Shard(0)]),
        "sharded rows": sharded_rows,
        "sharded mosaic": sharded_mosaic,
        "first rank only": on_ranks([0], [Replicate()]),
    }
    if world_size > 1:
        found["all but the first"] = on_ranks(everyone[1:], [Shard(0)])
    for a, b in {4: [(2, 2)], 6: [(2, 3), (3, 2)]}.get(world_size, [(1, world_size)]):
        for name, placements in _PAIRS.items():
            found[f"{a}x{b} {name}"] = on_mesh([a, b], placements)
        found[f"{a}x{b} tp, then dp by torch"] = on_mesh([a, b], [strided(0, b), Shard(0)])
        found[f"{a}x{b} tp, then dp by FSDP2"] = fsdp_over_tp(a, b)
        found[f"{a}x{b} strided columns"] = on_mesh([a, b], [strided(1, 2), Shard(0)])
    if world_size == 6:
        found["1x2x3"] = on_mesh([1, 2, 3], [Replicate(), Shard(1), Shard(1)])
        found["3x1x2"] = on_mesh([3, 1, 2], [Shard(0), Shard(0), Shard(1)])
    return found


_PAIRS: dict[str, list[Placement]] = {
    "R R": [Replicate(), Replicate()],
    "R S0": [Replicate(), Shard(0)],
    "S0 R": [Shard(0), Replicate()],
    "S0 S0": [Shard(0), Shard(0)],
    "S0 S1": [Shard(0), Shard(1)],
    "S1 S0": [Shard(1), Shard(0)],
    "S1 S1": [Shard(1), Shard(1)],
}


def parts_of(value: Any) -> list[torch.Tensor]:
    """What a rank holds of a value, whatever its kind."""
    if isinstance(value, DTensor):
        return [value.to_local().detach()]
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value]


def assert_holds(value: Any, expected: Any, what: str) -> None:
    """Both are parts of the same layout, with the same bits."""
    found, wanted = parts_of(value), parts_of(expected)
    assert len(found) == len(wanted), what
    for mine, theirs in zip(found, wanted, strict=True):
        assert same(mine, theirs), f"{what}: found {mine}, expected {theirs}"


def matrix(seed: int, shape: Sequence[int] = SHAPE) -> torch.Tensor:
    """Random bits: every float there is, infinities and NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31 - 1, tuple(shape), generator=generator, dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def blank(whole: torch.Tensor) -> torch.Tensor:
    """What cannot be taken for ``whole``: every bit of it is wrong."""
    if whole.dtype.is_complex or whole.dtype == torch.bool:
        return torch.ones_like(whole) if not whole.dtype.is_complex else torch.full_like(whole, -1)
    return (whole.contiguous().view(torch.uint8) ^ 0xFF).view(whole.dtype) if whole.dim() else whole + 1
