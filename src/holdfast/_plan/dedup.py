"""One writer for what several ranks hold, so that the ranks have about the same amount to write."""

import dataclasses
import heapq
from collections.abc import Iterator
from typing import NamedTuple

import torch

from holdfast._plan.all_plans import AllPlans
from holdfast._plan.write_columns import SHARD, Form, WriteColumns, WriteItems, is_open
from holdfast.planner import SavePlan

# Below this a part is not worth an item of its own.
_SMALLEST_PART = 128 * 1024
# A part is at most this fraction of what a rank writes: so the ranks' totals differ by no more than that.
_PARTS_A_RANK = 16


class _Part(NamedTuple):
    """A part of an item that a rank writes, while others write the rest of it."""

    position: int
    offset: torch.Size
    lengths: torch.Size


def dedup_save_plans(
    plans: list[SavePlan], table: AllPlans, *, lowest_rank: bool, may_split: bool
) -> list[SavePlan]:
    """Keep each item that several ranks can write in exactly one plan.

    The item goes to the rank with the fewest bytes so far, or to the lowest rank that has it. An item that
    only one rank has stays there. Plans come back in rank order; the input is unchanged.

    Args:
        plans: The plans in rank order.
        table: The table of these plans.
        lowest_rank: Let the lowest rank write, instead of spreading the work.
        may_split: Cut what is large, and let each rank that holds it write a part.

    Raises:
        InvalidPlanError: Ranks have different chunks at one place.
    """
    if len(plans) == 1:
        return plans
    duplicates = _find_duplicates(table)
    if duplicates is None:
        return plans
    assignment = _Assignment(table, duplicates)
    if lowest_rank:
        assignment.choose_first()
    else:
        assignment.choose_least_loaded(may_split=may_split)
    kept = assignment.kept_positions()
    return [
        _with_items(plan, columns, kept[rank], assignment.parts[rank])
        for rank, (plan, columns) in enumerate(zip(plans, table.plans, strict=True))
    ]


def _with_items(plan: SavePlan, columns: WriteColumns, kept: list[int], parts: list[_Part]) -> SavePlan:
    """The plan with some of its items, and with parts of others."""
    if len(kept) == len(columns) and not parts:
        return plan
    if not parts and is_open(plan):
        # The records that somebody made, or changed, are passed on as they are.
        return dataclasses.replace(plan, items=[plan.items[number] for number in kept])
    taken = columns.take(kept)
    for position, offset, lengths in parts:
        form = columns.forms[columns.form[position]]
        taken.add(columns.keys[position], SHARD, len(taken.forms), len(taken.offsets), -1)
        taken.forms.append(Form(form.properties, form.size, lengths))
        taken.offsets.append(offset)
    return dataclasses.replace(plan, items=WriteItems(taken))


class _Duplicates(NamedTuple):
    """The chunks and objects that several ranks can write, thing by thing.

    Attributes:
        rows: Their rows in the table: the rows of one thing after those of another, each in the order of
            ranks. At the end are empty shards that stand at the place of a full one, and belong to no thing.
        begins: Where the rows of each thing begin.
        counts: How many they are.
        nbytes: How many bytes each of them takes.
    """

    rows: torch.Tensor
    begins: torch.Tensor
    counts: torch.Tensor
    nbytes: torch.Tensor

    def by_holders(self, things: torch.Tensor, rank: torch.Tensor) -> Iterator[torch.Tensor]:
        """The things in portions that the same ranks hold, those of few ranks first.

        Args:
            things: Which ones; they keep their order within a portion.
            rank: For each row of the table its rank.
        """
        counts, world = self.counts[things], int(rank.max()) + 1
        for count in torch.unique(counts).tolist():
            of_count = things[counts == count]
            ranks = rank[self.rows[self.begins[of_count, None] + torch.arange(count, device="cpu")]]
            same = torch.zeros(len(of_count), dtype=torch.int64, device="cpu")
            for holder in ranks.unbind(1):
                _, same = torch.unique(same * world + holder, return_inverse=True)
            order = torch.argsort(same, stable=True)
            yield from torch.split(of_count[order], torch.bincount(same).tolist())


def _find_duplicates(table: AllPlans) -> _Duplicates | None:
    """Find the chunks and objects that several rows of the table can write; None if there are none.

    Raises:
        InvalidPlanError: Ranks have different chunks at one place.
    """
    starts = torch.ones(len(table.name), dtype=torch.bool, device="cpu")
    starts[1:] = table.name[1:] != table.name[:-1]
    if bool(starts.all()):
        return None
    thing = torch.cumsum(starts, 0) - 1
    count = int(thing[-1]) + 1
    sizes = table.nbytes()[table.order]
    # Empty shards may stand at the place of one that is not.
    largest = torch.zeros(count, dtype=torch.int64, device="cpu").scatter_reduce_(0, thing, sizes, "amax")
    is_full = sizes == largest[thing]
    wrong = ~is_full & (sizes != 0) & (table.form[table.order] >= 0)
    if bool(wrong.any()):
        table.refuse_sizes(table.order[thing == thing[wrong.nonzero()[0]]].tolist())
    is_shared = (torch.bincount(thing) > 1)[thing]
    full, empty = is_shared & is_full, is_shared & ~is_full
    things, counts = torch.unique_consecutive(thing[full], return_counts=True)
    rows = torch.cat([table.order[full], table.order[empty]])
    return _Duplicates(rows, torch.cumsum(counts, 0) - counts, counts, largest[things])


class _Assignment:
    """Which rank writes what.

    Attributes:
        parts: For each rank the parts that it writes of what was cut.
    """

    def __init__(self, table: AllPlans, duplicates: _Duplicates) -> None:
        world = len(table.plans)
        self._table, self._duplicates = table, duplicates
        self._keep = torch.ones(len(table.rank), dtype=torch.bool, device="cpu")
        self._keep[duplicates.rows] = False
        alone = table.nbytes()[self._keep].double()
        self._load: list[float] = torch.bincount(table.rank[self._keep], alone, world).tolist()
        self.parts: list[list[_Part]] = [[] for _ in range(world)]

    def kept_positions(self) -> list[list[int]]:
        """For each rank the positions of the items that stay in its plan."""
        rank, position = self._table.rank[self._keep], self._table.position[self._keep]
        counts = torch.bincount(rank, minlength=len(self._table.plans)).tolist()
        return [part.tolist() for part in torch.split(position, counts)]

    def choose_first(self) -> None:
        """Each thing is written by the lowest rank that has it."""
        self._keep[self._duplicates.rows[self._duplicates.begins]] = True

    def choose_least_loaded(self, *, may_split: bool) -> None:
        """Each thing is written by the rank that has the least to write so far, the largest thing first.

        Things that few ranks hold are dealt before things that many ranks hold, which even out the rest.
        Things that the same ranks hold are dealt together, from a heap of these ranks.
        """
        duplicates = self._duplicates
        order = torch.argsort(duplicates.nbytes, descending=True, stable=True)
        if may_split:
            total = sum(self._load) + float(duplicates.nbytes.sum())
            largest = max(_SMALLEST_PART, total / len(self._load) / _PARTS_A_RANK)
            large = int((duplicates.nbytes > largest).sum())
            whole = [number for number in order[:large].tolist() if not self._split(number, largest)]
            order = torch.cat([torch.tensor(whole, dtype=torch.int64, device="cpu"), order[large:]])
        for things in duplicates.by_holders(order, self._table.rank):
            self._deal(things)

    def _deal(self, things: torch.Tensor) -> None:
        """Give out things that the same ranks hold."""
        begins = self._duplicates.begins[things]
        first, count = int(begins[0]), int(self._duplicates.counts[things[0]])
        holders = self._table.rank[self._duplicates.rows[first : first + count]].tolist()
        # Of ranks with the same load the lowest is taken.
        heap = [(self._load[rank], place) for place, rank in enumerate(holders)]
        heapq.heapify(heap)
        places = []
        for nbytes in self._duplicates.nbytes[things].tolist():
            load, place = heap[0]
            heapq.heapreplace(heap, (load + nbytes, place))
            places.append(place)
        for load, place in heap:
            self._load[holders[place]] = load
        self._keep[self._duplicates.rows[begins + torch.tensor(places, device="cpu")]] = True

    def _split(self, thing: int, largest: float) -> bool:
        """Give parts of a chunk to the ranks that hold it; False if it cannot be cut."""
        table, begin = self._table, int(self._duplicates.begins[thing])
        rows = self._duplicates.rows[begin : begin + int(self._duplicates.counts[thing])].tolist()
        number = int(table.form[rows[0]])
        if number < 0:
            return False
        form, offset = table.forms[number], table.offsets[int(table.offset[rows[0]])]
        count = min(len(rows), int(-(-form.nbytes // largest)))
        dimension = _best_cut(form.lengths, count)
        if dimension is None or count < 2:
            return False
        ranks = {row: int(table.rank[row]) for row in rows}
        holders = sorted(rows, key=lambda row: self._load[ranks[row]])[:count]
        length = form.lengths[dimension]
        cuts = [length * part // count for part in range(count + 1)]
        for row, start, end in zip(holders, cuts[:-1], cuts[1:], strict=True):
            at, lengths = list(offset), list(form.lengths)
            at[dimension] += start
            lengths[dimension] = end - start
            part = _Part(int(table.position[row]), torch.Size(at), torch.Size(lengths))
            self.parts[ranks[row]].append(part)
            self._load[ranks[row]] += form.nbytes * (end - start) / length
        return True


def _best_cut(lengths: torch.Size, count: int) -> int | None:
    """The dimension to cut into ``count`` parts: the outermost one of which they are about equally large."""
    for dimension, length in enumerate(lengths):
        if length >= count and (length % count == 0 or length >= 16 * count):
            return dimension
    longest = max(range(len(lengths)), key=lengths.__getitem__, default=None)
    return longest if longest is not None and lengths[longest] >= count else None
