"""Which lines of a load several ranks need, and whether these are passed on or found in the page cache."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from holdfast._io.store import CacheRoom

# Fewer bytes than this are read by each rank itself before the connections to the others would be there.
_WORTH_PASSING_ON = 256 * 1024

Group = tuple[tuple[int, ...], bytes]
"""The ranks that pass some lines on to each other, and the names of the lines, in the order of reading."""


class Offer(NamedTuple):
    """What a rank needs: the names of its lines, about how many bytes each has, and its page cache."""

    names: bytes
    sizes: bytes
    cache: CacheRoom | None


class Answer(NamedTuple):
    """What a rank is told.

    Attributes:
        groups: With whom it passes lines on.
        in_cache: Whether other ranks of its machine read, too, and find in the page cache what it has read.
        nbytes: How many bytes the ranks that share its page cache read in all.
    """

    groups: list[Group]
    in_cache: bool
    nbytes: int


def find_groups(offers: Sequence[Offer | None]) -> list[Answer]:
    """On the coordinator: how each rank reads the lines that others need, too."""
    taking_part = [(rank, offer) for rank, offer in enumerate(offers) if offer is not None and offer.names]
    groups: list[list[Group]] = [[] for _ in offers]
    machines = _Machines(taking_part)
    if len(taking_part) > 1:
        common = _common_lines(taking_part)
        # All ranks go through their groups in this order, so that none waits for one that waits for it.
        for members in sorted(common):
            names, volume = common[members]
            if volume >= _WORTH_PASSING_ON and not machines.are_one(members):
                for rank in members:
                    groups[rank].append((members, names.tobytes()))
    return [
        Answer(groups[rank], machines.are_one([rank]), machines.nbytes.get(machines.of_rank.get(rank, ""), 0))
        for rank in range(len(offers))
    ]


def _common_lines(
    taking_part: Sequence[tuple[int, Offer]],
) -> "dict[tuple[int, ...], tuple[array[int], int]]":
    """By the ranks that need them: the names of lines that several ranks need, and their bytes."""
    names = torch.cat([_numbers(offer.names) for _, offer in taking_part])
    sizes = torch.cat([_numbers(offer.sizes) for _, offer in taking_part])
    counts = torch.tensor([len(offer.names) // 8 for _, offer in taking_part], device="cpu")
    ranks = torch.repeat_interleave(torch.tensor([rank for rank, _ in taking_part], device="cpu"), counts)
    order = torch.argsort(names, stable=True)
    starts = _first_of_each(names[order]).nonzero().flatten()
    ends = torch.cat([starts[1:], torch.tensor([len(names)], device="cpu")])
    shared = ends - starts > 1
    by_name, by_rank, by_size = names[order].tolist(), ranks[order].tolist(), sizes[order].tolist()
    found: dict[tuple[int, ...], array[int]] = defaultdict(lambda: array("q"))
    volume: Counter[tuple[int, ...]] = Counter()
    for start, end in zip(starts[shared].tolist(), ends[shared].tolist(), strict=True):
        members = tuple(by_rank[start:end])
        found[members].append(by_name[start])
        volume[members] += by_size[start]
    return {members: (names, volume[members]) for members, names in found.items()}


class _Machines:
    """The page caches of all ranks.

    Attributes:
        of_rank: Each rank's page cache, by its identity.
        nbytes: How many bytes are read into each, if each line is read once.
    """

    def __init__(self, taking_part: Sequence[tuple[int, Offer]]) -> None:
        offers: dict[str, list[Offer]] = defaultdict(list)
        room: dict[str, int] = {}
        self.of_rank: dict[int, str] = {}
        for rank, offer in taking_part:
            if offer.cache is not None:
                identity, nbytes = offer.cache
                offers[identity].append(offer)
                room[identity] = min(nbytes, room.get(identity, nbytes))
                self.of_rank[rank] = identity
        self.nbytes = {identity: _unique_nbytes(some) for identity, some in offers.items()}
        self._used = {
            identity
            for identity, some in offers.items()
            if len(some) > 1 and self.nbytes[identity] <= room[identity]
        }

    def are_one(self, ranks: Sequence[int]) -> bool:
        """Whether ranks share a page cache (one rank: with others) that has room for all that they read."""
        found = {self.of_rank.get(rank) for rank in ranks}
        return len(found) == 1 and found <= self._used


def _unique_nbytes(offers: Sequence[Offer]) -> int:
    names, order = torch.cat([_numbers(offer.names) for offer in offers]).sort()
    sizes = torch.cat([_numbers(offer.sizes) for offer in offers])[order]
    return int(sizes[_first_of_each(names)].sum())


def _numbers(packed: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.int64)


def _first_of_each(ordered: torch.Tensor) -> torch.Tensor:
    """Which of the numbers differ from the one before."""
    begins = torch.ones(len(ordered), dtype=torch.bool, device="cpu")
    begins[1:] = ordered[1:] != ordered[:-1]
    return begins
