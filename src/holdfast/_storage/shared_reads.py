"""Carrying out a load plan together with other ranks, so that what several of them need is read once."""

import hashlib
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from holdfast._contents.whole_rows import is_read_whole, whole_rows
from holdfast._io import pool
from holdfast._io.store import FileSource
from holdfast._plan.planner_values import own_values
from holdfast._plan.read_columns import ReadColumns, ReadItems
from holdfast._ranks.exchange import Exchange
from holdfast._storage.broadcast_source import BroadcastSource
from holdfast._storage.common_lines import Group, Offer, find_groups
from holdfast._storage.item_places import ItemPlaces, places_of
from holdfast._storage.read_requests import columns_in
from holdfast._storage.reading import sizes_of_files
from holdfast._storage.writing import deal_neighbours
from holdfast.metadata import Metadata
from holdfast.planner import LoadPlan, LoadPlanner

_MOST_BROADCASTS = 4
_ROW_STEP = 0x9E3779B97F4A7C15  # odd, and its multiples are spread over all 64 bits


def read_together(
    store: FileSource,
    finish_plan: Callable[[], LoadPlan],
    planner: LoadPlanner,
    metadata: Metadata,
    exchange: Exchange,
    read: Callable[[FileSource, LoadPlan, int | None], None],
    *,
    willing: bool,
) -> Callable[[], None]:
    """Find out with whom to read; called on every rank of the exchange.

    Args:
        store: The checkpoint.
        finish_plan: Gives what this rank needs.
        planner: Its planner.
        metadata: The checkpoint's metadata.
        exchange: The ranks.
        read: Carries out a plan on a store with a number of threads; None for as many as it likes.
        willing: Whether this rank takes part. One that does not reads for itself.

    Returns:
        What reads every line of the plan, to be called on every rank in the part of one step. Each line
        that several ranks need is read from storage once: ranks of one machine find it in the page cache
        after one of them has read it, if there is room; otherwise the one that reads it passes it on.
    """
    plan: LoadPlan | None = None
    names: _Names | None = None

    def offer() -> Offer | None:
        nonlocal plan, names
        plan = finish_plan()
        if willing and exchange.can_broadcast:
            places = places_of(metadata)
            columns = columns_in(plan, places)
            if columns is not None and places is not None:
                names = _Names(columns, places, planner, store.traits.request_nbytes)
        return None if names is None else Offer(*names.offer(), store.cache_room(names.files()))

    groups, in_cache, nbytes = exchange.decide("share reads", offer, find_groups)
    assert plan is not None
    store.expect(nbytes)
    own = store.through_cache() if in_cache else store
    if names is None or not groups:
        whole = plan
        return lambda: read(own, whole, None)
    return partial(_read_all, own, store, names, groups, exchange, read)


class _Names:
    """This rank's lines by names that mean the same on every rank."""

    def __init__(
        self, columns: ReadColumns, places: ItemPlaces, planner: LoadPlanner, request_nbytes: int
    ) -> None:
        self.columns = columns
        self.places = places
        self._request_nbytes = request_nbytes
        # A rank that asks its planner for each tensor reads in other portions than one that does not.
        self.values = own_values(planner, "resolve_tensor")
        self.lines: dict[int, int] = {}
        self._parts: dict[int, tuple[Any, ...]] = {}
        doubles = set()
        for number, name in self._names():
            if self.lines.setdefault(name, number) != number:
                doubles.add(name)
        for name in doubles:
            del self.lines[name]

    def _names(self) -> Iterator[tuple[int, int]]:
        columns, style = self.columns, self.values is not None
        digests: dict[Any, int] = {}
        for number, row in enumerate(columns.rows):
            self._parts[number] = part = self._part(number)
            # Tensors that are divided alike have equal parts: one digest serves thousands of them.
            what = style, part
            if (digest := digests.get(what)) is None:
                found = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
                digest = digests[what] = int.from_bytes(found, "little")
            yield number, (digest + row * _ROW_STEP) % (1 << 64) - (1 << 63)

    def _part(self, number: int) -> tuple[Any, ...]:
        """Which part of its stored item a line reads: all that is read for several ranks at once."""
        box = self.columns.boxes.get(number)
        if box is None:
            return ()
        row = self.columns.rows[number]
        offsets, lengths = tuple(box.storage_offsets), tuple(box.lengths)
        if self.places.payload_nbytes[row] > 0 and self.places.is_plain(row) and not box.is_whole:
            shape = self.places.chunk_shape(self.columns.keys[number], row)
            itemsize = self.places.payload_nbytes[row] // math.prod(shape)
            if is_read_whole(shape, lengths, itemsize, self._request_nbytes):
                return (*(0 for _ in shape), *shape, "whole chunk")
            rows = whole_rows(shape, offsets, lengths, itemsize, self.places.manifest.block_size)
            if rows is not None:
                return (*rows.offsets, *rows.lengths, "whole rows")
        return *offsets, *lengths

    def offer(self) -> tuple[bytes, bytes]:
        """The names, and about how many bytes each stands for."""
        nbytes = [self.nbytes(number) for number in self.lines.values()]
        return array("q", self.lines).tobytes(), array("q", nbytes).tobytes()

    def files(self) -> set[str]:
        """The files that are read."""
        files = self.places.files
        return {
            self.places.manifest.file_names[number] for number in {files[row] for row in self.columns.rows}
        }

    def in_order(self, names: Sequence[int]) -> list[int]:
        """The lines of those names in the order of the files, so that neighbours are read together.

        It is the same on every member.
        """
        rows, files, offsets = self.columns.rows, self.places.files, self.places.offsets

        def place(line: int) -> tuple[Any, ...]:
            row = rows[line]
            return files[row], offsets[row], row, self._parts[line]

        return sorted((self.lines[name] for name in names), key=place)

    def of_kind(self, lines: list[int], *, objects: bool) -> list[int]:
        """Those of the lines that are objects, or those that are not."""
        keys, kinds, numbers = self.columns.keys, self.columns.directory.kinds, self.columns.directory.numbers
        return [number for number in lines if bool(kinds[numbers[keys[number]]]) == objects]

    def plan(self, numbers: list[int]) -> LoadPlan:
        """The plan of some lines."""
        return LoadPlan(ReadItems(self.columns.take(numbers)))

    def nbytes(self, number: int) -> int:
        """About how many bytes a line reads."""
        row, box = self.columns.rows[number], self.columns.boxes.get(number)
        stored = max(self.places.nbytes[row], 0)
        if box is None or not self.places.payload_nbytes[row] > 0:
            return stored
        lengths = self._parts[number][len(box.lengths) : 2 * len(box.lengths)]
        return int(min(stored, 8 * math.prod(lengths)))


def _read_all(
    own_store: FileSource,
    store: FileSource,
    names: _Names,
    groups: list[Group],
    exchange: Exchange,
    read: Callable[[FileSource, LoadPlan, int | None], None],
) -> None:
    """Carry out a plan together with others.

    Objects come first, so that one that is refused is found before a tensor is overwritten.
    """
    ordered = [(members, names.in_order(memoryview(lines).cast("q"))) for members, lines in groups]
    common = {number for _, numbers in ordered for number in numbers}
    own = [number for number in range(len(names.columns)) if number not in common]
    sizes = sizes_of_files(store)
    for objects in (True, False):
        if some := names.of_kind(own, objects=objects):
            read(own_store, names.plan(some), None)
        for members, lines in ordered:
            if some := names.of_kind(lines, objects=objects):
                _read_with(members, some, store, sizes, names, exchange, read)


def _read_with(
    members: tuple[int, ...],
    numbers: list[int],
    store: FileSource,
    sizes: dict[str, int],
    names: _Names,
    exchange: Exchange,
    read: Callable[[FileSource, LoadPlan, int | None], None],
) -> None:
    """Several broadcasts at once, so that several members read while others pass on."""
    nbytes = [names.nbytes(number) for number in numbers]
    most, request_nbytes = min(_MOST_BROADCASTS, len(members)), store.traits.request_nbytes
    if request_nbytes:
        # Each of them waits for one request at a time.
        most = min(store.traits.requests_in_flight, max(1, round(sum(nbytes) / request_nbytes)))
    portions = deal_neighbours(numbers, nbytes, most if names.values is not None else 1)
    dealt = [portion for portion in portions if portion]
    opened = [exchange.open_broadcast(members) for _ in dealt]

    def job(at: int) -> None:
        with opened[at]:
            source = BroadcastSource(store, opened[at], exchange.rank, at, sizes)
            read(source, names.plan(dealt[at]), 1)

    pool.run([partial(job, at) for at in range(len(dealt))], threads=len(dealt))
