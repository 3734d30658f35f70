"""Who writes what several ranks hold: each thing once, so that the ranks have about the same to write."""

import heapq

import torch

from holdfast._plan.all_plans import AllPlans, Replicated

__all__ = ["Assignment", "Piece", "assign"]

# Below this a piece is not worth a line of its own.
_SMALLEST_PIECE = 128 * 1024
# A piece is at most this part of what a rank writes: so the ranks' loads differ by no more than that.
_PIECES_A_RANK = 16

Piece = tuple[int, torch.Size, torch.Size]
"""A part of a line that a rank writes: the line's number, and the offsets and lengths of the part."""


def assign(offers: AllPlans, shared: Replicated, *, lowest_rank: bool, may_split: bool) -> "Assignment":
    """Decide for everything that several ranks offer.

    Args:
        offers: What ranks offer.
        shared: What several of them do.
        lowest_rank: Do not spread the work.
        may_split: Cut what is large, and let each rank that holds it write a part.
    """
    assignment = Assignment(offers, shared)
    if lowest_rank:
        assignment.choose_first()
    else:
        assignment.choose_least_loaded(may_split=may_split)
    return assignment


class Assignment:
    """What is decided.

    Attributes:
        pieces: For each rank the parts that it writes of what was cut.
    """

    def __init__(self, offers: AllPlans, shared: Replicated) -> None:
        world = len(offers.plans)
        self._offers, self._shared = offers, shared
        self._keep = torch.ones(len(offers.rank), dtype=torch.bool)
        self._keep[shared.rows] = False
        alone = offers.nbytes()[self._keep].double()
        self._load: list[float] = torch.bincount(offers.rank[self._keep], alone, world).tolist()
        self.pieces: list[list[Piece]] = [[] for _ in range(world)]

    def kept_positions(self) -> list[list[int]]:
        """For each rank the lines that stay with it."""
        rank, position = self._offers.rank[self._keep], self._offers.position[self._keep]
        counts = torch.bincount(rank, minlength=len(self._offers.plans)).tolist()
        return [part.tolist() for part in torch.split(position, counts)]

    def choose_first(self) -> None:
        """Each thing is written by the lowest rank that has it."""
        self._keep[self._shared.rows[self._shared.begins]] = True

    def choose_least_loaded(self, *, may_split: bool) -> None:
        """Each thing is written by the rank that has the least to write so far, the largest thing first.

        What few ranks hold goes before what many do, who can even it out. Things that the same ranks hold
        are dealt together, from a heap of these ranks.
        """
        shared = self._shared
        order = torch.argsort(shared.nbytes, descending=True, stable=True)
        if may_split:
            total = sum(self._load) + float(shared.nbytes.sum())
            largest = max(_SMALLEST_PIECE, total / len(self._load) / _PIECES_A_RANK)
            large = int((shared.nbytes > largest).sum())
            whole = [number for number in order[:large].tolist() if not self._split(number, largest)]
            order = torch.cat([torch.tensor(whole, dtype=torch.int64), order[large:]])
        for things in shared.by_holders(order, self._offers.rank):
            self._deal(things)

    def _deal(self, things: torch.Tensor) -> None:
        """Give out things that the same ranks hold."""
        begins = self._shared.begins[things]
        first, count = int(begins[0]), int(self._shared.counts[things[0]])
        holders = self._offers.rank[self._shared.rows[first : first + count]].tolist()
        # Of ranks with the same load the lowest is taken.
        heap = [(self._load[rank], place) for place, rank in enumerate(holders)]
        heapq.heapify(heap)
        places = []
        for nbytes in self._shared.nbytes[things].tolist():
            load, place = heap[0]
            heapq.heapreplace(heap, (load + nbytes, place))
            places.append(place)
        for load, place in heap:
            self._load[holders[place]] = load
        self._keep[self._shared.rows[begins + torch.tensor(places)]] = True

    def _split(self, thing: int, largest: float) -> bool:
        """Give parts of a chunk to the ranks that hold it; False if it cannot be cut."""
        offers, begin = self._offers, int(self._shared.begins[thing])
        rows = self._shared.rows[begin : begin + int(self._shared.counts[thing])].tolist()
        number = int(offers.form[rows[0]])
        if number < 0:
            return False
        form, offset = offers.forms[number], offers.offsets[int(offers.offset[rows[0]])]
        count = min(len(rows), int(-(-form.nbytes // largest)))
        dimension = _best_cut(form.lengths, count)
        if dimension is None or count < 2:
            return False
        ranks = {row: int(offers.rank[row]) for row in rows}
        holders = sorted(rows, key=lambda row: self._load[ranks[row]])[:count]
        length = form.lengths[dimension]
        cuts = [length * part // count for part in range(count + 1)]
        for row, start, end in zip(holders, cuts[:-1], cuts[1:], strict=True):
            at, lengths = list(offset), list(form.lengths)
            at[dimension] += start
            lengths[dimension] = end - start
            piece = (int(offers.position[row]), torch.Size(at), torch.Size(lengths))
            self.pieces[ranks[row]].append(piece)
            self._load[ranks[row]] += form.nbytes * (end - start) / length
        return True


def _best_cut(lengths: torch.Size, count: int) -> int | None:
    """The dimension to cut into ``count`` parts: the outermost one of which they are about equally large."""
    for dimension, length in enumerate(lengths):
        if length >= count and (length % count == 0 or length >= 16 * count):
            return dimension
    longest = max(range(len(lengths)), key=lengths.__getitem__, default=None)
    return longest if longest is not None and lengths[longest] >= count else None
