"""What the ranks of a simulated job hold: many tensors over many ranks, none of which exists."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from holdfast.testing import FakeRank
from holdfast.testing.fake_exchange import FakeGroup

__all__ = ["LAYOUTS", "Fleet", "Layout", "Part"]

Layout = Literal["shards", "shapes", "hsdp", "replicas", "rows", "columns", "grid"]
"""How the tensors lie on the ranks.

shards: Each is divided by rows over all ranks; there are seven shapes.
shapes: The same, and no two tensors have the same shape.
hsdp: Each is divided by rows over half of the ranks, and the other half holds the same once more.
replicas: Every rank holds every tensor whole.
rows, columns, grid: Each is of twice as many rows as columns, and divided along the one, the other, or both.
"""
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


class Part(NamedTuple):
    """What one rank holds of one tensor."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Fleet:
    """A job of so many ranks with so many tensors."""

    layout: Layout
    ranks: int
    tensors: int

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold parts of tensors."""
        return self.layout != "replicas"

    def parts(self, rank: int) -> Iterator[Part]:
        """What a rank holds, tensor by tensor, worked out without torch."""
        cells = self._cells()
        # The mesh of replicated shards has a dimension of replicas first: it does not count here.
        number = rank % (cells[0] * cells[1])
        row, column = divmod(number, cells[1])
        for number in range(self.tensors):
            shape = self._shape(number)
            if not self.is_sharded:
                yield Part(_key(number), shape, (0,) * len(shape), shape)
                continue
            lengths = (shape[0] // cells[0], shape[1] // cells[1])
            yield Part(_key(number), shape, (row * lengths[0], column * lengths[1]), lengths)

    def state(self, rank: int, *, to_load: bool = False) -> dict[str, Any]:
        """What a rank would give to ``save`` or ``load``: a model of DTensors, or of plain tensors.

        To be saved, tensors of one shape are one object: what is planned is the same, and it is made sooner.
        """
        fake = FakeRank(rank, FakeGroup(self.ranks, timeout=60))
        made: dict[object, torch.Tensor] = {}
        for number, part in enumerate(self.parts(rank)):
            which = number if to_load else part.shape
            if which not in made:
                local = torch.zeros(part.lengths)
                made[which] = (
                    fake.assemble(local, fake.mesh(*self._mesh()), self._placements(), part.shape)
                    if self.is_sharded
                    else local
                )
        return {"model": {_name(n): made[n if to_load else self._shape(n)] for n in range(self.tensors)}}

    def path(self, number: int) -> tuple[str, str]:
        """Where a tensor stands in the state."""
        return "model", _name(number)

    def _shape(self, number: int) -> tuple[int, ...]:
        rows, columns = self._cells()
        if self.layout in {"rows", "columns", "grid"}:
            return 2 * self.ranks, self.ranks
        width = 4 + number if self.layout == "shapes" else 4 * (1 + number % 7)
        return rows, width * columns

    def _cells(self) -> tuple[int, int]:
        """Into how many parts the rows and the columns are divided."""
        if self.layout == "grid":
            rows = 1 << (self.ranks.bit_length() - 1) // 2
            assert self.ranks % rows == 0, "a grid needs a number of ranks that is a power of two"
            return rows, self.ranks // rows
        divided = {"columns": (1, self.ranks), "hsdp": (self.ranks // 2, 1), "replicas": (1, 1)}
        return divided.get(self.layout, (self.ranks, 1))

    def _mesh(self) -> tuple[int, ...]:
        if self.layout == "grid":
            return self._cells()
        return (2, self.ranks // 2) if self.layout == "hsdp" else (self.ranks,)

    def _placements(self) -> list[Placement]:
        if self.layout == "hsdp":
            return [Replicate(), Shard(0)]
        if self.layout == "grid":
            return [Shard(0), Shard(1)]
        return [Shard(1)] if self.layout == "columns" else [Shard(0)]


def _name(number: int) -> str:
    return f"layers.{number}.weight"


def _key(number: int) -> str:
    return f"model.{_name(number)}"
