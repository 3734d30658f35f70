"""Which lines ranks pass on to each other, and which they find in the page cache of their machine."""

from array import array

from holdfast._io.store import CacheRoom
from holdfast._storage.common_lines import Offer, find_groups

MIB = 1 << 20


def offer(sizes: dict[int, int], machine: str | None, room: int = 1 << 40) -> Offer:
    """A rank that needs the lines of these names, each of so many MiB."""
    nbytes = array("q", [size * MIB for size in sizes.values()])
    cache = None if machine is None else CacheRoom(machine, room)
    return Offer(array("q", sizes).tobytes(), nbytes.tobytes(), cache)


def groups(offers: list[Offer | None]) -> list[list[tuple[int, ...]]]:
    return [[members for members, _ in answer.groups] for answer in find_groups(offers)]


def test_ranks_of_one_machine_pass_nothing_on() -> None:
    answers = find_groups([offer({1: 5, 2: 7}, "a"), offer({2: 7, 3: 1}, "a")])
    assert [answer.groups for answer in answers] == [[], []]
    assert [answer.in_cache for answer in answers] == [True, True]
    assert [answer.nbytes for answer in answers] == [13 * MIB, 13 * MIB]  # what both need counts once


def test_ranks_of_different_machines_pass_on_what_they_have_in_common() -> None:
    offers: list[Offer | None] = [offer({1: 5}, "a"), offer({1: 5, 2: 4}, "b"), offer({2: 4}, "b")]
    assert groups(offers) == [[(0, 1)], [(0, 1)], []]
    assert [answer.in_cache for answer in find_groups(offers)] == [False, True, True]


def test_ranks_without_a_page_cache_in_common_pass_on() -> None:
    assert groups([offer({1: 5}, None), offer({1: 5}, None)]) == [[(0, 1)], [(0, 1)]]
    assert groups([offer({1: 5}, "a"), offer({1: 5}, None)]) == [[(0, 1)], [(0, 1)]]


def test_ranks_of_a_machine_without_room_for_all_of_them_pass_on() -> None:
    offers: list[Offer | None] = [offer({1: 5, 2: 6}, "a"), offer({1: 5, 3: 6}, "a", room=16 * MIB)]
    assert groups(offers) == [[(0, 1)], [(0, 1)]]
    assert [answer.in_cache for answer in find_groups(offers)] == [False, False]


def test_a_rank_that_does_not_take_part_reads_for_itself() -> None:
    answers = find_groups([offer({1: 5}, "a"), None])
    assert [(answer.groups, answer.in_cache) for answer in answers] == [([], False), ([], False)]
