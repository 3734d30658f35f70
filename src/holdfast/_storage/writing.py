"""Writing the items of a plan into data files of a store."""

import contextlib
import heapq
import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from holdfast._io import pool
from holdfast._io.pool import Cancellation
from holdfast._io.progress import ProgressTracker
from holdfast._io.store import ByteStore
from holdfast._plan.planner_values import own_values
from holdfast._plan.write_columns import BYTE_IO, TENSOR, columns_of, is_open
from holdfast._storage.cleanup import delete_quietly
from holdfast._storage.item_writer import PACK, ItemWriter
from holdfast._storage.results import Results, WrittenItems
from holdfast._storage.small_items import SMALL
from holdfast._tensors.chunks import find_box
from holdfast._tensors.layout_table import LayoutTable
from holdfast.errors import InvalidPlanError, StorageError
from holdfast.extension import StreamTransformExtension
from holdfast.planner import SavePlan, SavePlanner

T = TypeVar("T")

_WRAP = 700
"""About what the container of a small tensor takes."""


def write_items(
    store: ByteStore,
    plan: SavePlan,
    planner: SavePlanner,
    *,
    name_file: Callable[[int], str],
    one_file: bool,
    threads: int,
    durable: bool,
    transforms: Sequence[StreamTransformExtension],
    budget: int,
    progress: ProgressTracker,
) -> Results:
    """Write every item of a plan into new files; on return they are on stable storage, names included.

    Args:
        store: Where to.
        plan: What to write.
        planner: Gives the data.
        name_file: Names the rank's files by their numbers.
        one_file: One file for each thread. False: one for each item.
        threads: How many threads write, at most.
        durable: Whether to wait for stable storage.
        transforms: What each item goes through; the first one stands next to the file.
        budget: The most memory taken besides the state.
        progress: Is told of the bytes that were written. An exception that it raises stops the write.

    Raises:
        InvalidPlanError: The planner gave neither a tensor nor bytes.
        OSError: The storage failed. In this and any other case none of the files is left.
    """
    work = _Work(plan, planner, straight=not transforms)
    count = len(work.columns)
    buckets = _deal(work.nbytes, threads) if one_file else [[number] for number in range(count)]
    cancellation = Cancellation()
    # A file being written holds a ring of buffers; what is not in the host's memory as it is stored takes
    # copies besides. With many threads and a small budget, fewer work at once.
    buffers = store.traits.writer_nbytes
    threads = max(1, min(threads, budget // (2 * buffers)))
    copy_at_once = max(1 << 20, min(buffers, budget // threads - buffers))
    finished: list[str] = []
    store.expect(sum(work.nbytes))

    def job(file_number: int, numbers: Sequence[int]) -> WrittenItems:
        name = name_file(file_number)
        hint = sum(work.nbytes[number] for number in numbers) + 1024 * len(numbers)
        with store.create(name, nbytes_hint=hint, durable=durable) as file:
            file.progress = progress
            writer = ItemWriter(file, file_number, work.columns, transforms, copy_at_once)
            items = work.write_file(writer, numbers, cancellation)
        finished.append(name)
        return items

    jobs = [(lambda number=number, items=items: job(number, items)) for number, items in enumerate(buckets)]
    written = WrittenItems()
    try:
        for items in pool.run(jobs, threads=threads, cancellation=cancellation):
            written.extend(items)
        if durable and jobs:
            store.sync()
    except BaseException:
        delete_quietly(store, finished)
        raise
    descriptors = tuple(transform.get_descriptor() for transform in transforms) or None
    names = list(map(name_file, range(len(jobs))))
    return Results(written.sealed(work.columns.offsets, {"file_names": names, "transforms": [descriptors]}))


class _Work:
    """What a plan asks to be written: in portions, each with the data that the planner has for it.

    Attributes:
        columns: The plan's lines.
        nbytes: The bytes of each.
    """

    def __init__(self, plan: SavePlan, planner: SavePlanner, *, straight: bool) -> None:
        self.columns = columns_of(plan)
        self.nbytes = self.columns.item_nbytes()
        self.planner = planner
        self._lines = plan.items if is_open(plan) else None
        # Where the planner would only look a tensor up, it is not asked for each of thousands.
        self._values = own_values(planner, "resolve_data") if straight else None
        self._layouts = LayoutTable()

    def write_file(
        self, writer: ItemWriter, numbers: Sequence[int], cancellation: Cancellation
    ) -> WrittenItems:
        """Write some lines, which are all of a file."""
        for portion in self._portions(numbers):
            cancellation.check()
            with self._naming(portion):
                self._write(writer, portion)
        # What was buffered leaves only now: any of the file's items may be the one that fails.
        with self._naming(numbers):
            return writer.finish()

    def _portions(self, numbers: Sequence[int]) -> Iterator[Sequence[int]]:
        """The lines in their order, small whole tensors together and everything else alone."""
        if self._values is None:
            yield from ([number] for number in numbers)
            return
        nbytes, kinds = self.nbytes, self.columns.kinds
        for small, run in itertools.groupby(numbers, lambda n: nbytes[n] < SMALL and kinds[n] != BYTE_IO):
            if not small:
                yield from ([number] for number in run)
                continue
            portion, room = list[int](), PACK
            for number in run:
                portion.append(number)
                room -= nbytes[number] + _WRAP
                if room <= 0:
                    yield portion
                    portion, room = [], PACK
            if portion:
                yield portion

    def _write(self, writer: ItemWriter, portion: Sequence[int]) -> None:
        """Write one portion."""
        first = portion[0]
        if self._values is None or self.columns.kinds[first] == BYTE_IO:
            writer.add(first, self._data(first))
        elif self.nbytes[first] < SMALL:
            writer.add_small_tensors(portion, self._tensors(portion, self._values))
        else:
            (tensor,) = self._tensors(portion, self._values)
            writer.add(first, tensor)

    def _tensors(self, numbers: Sequence[int], values: Mapping[str, Any]) -> Iterator[Any]:
        """The tensors of lines, out of the planner's flat state."""
        keys, kinds, layouts = self.columns.keys, self.columns.kinds, self._layouts
        for number in numbers:
            key = keys[number]
            if kinds[number] == TENSOR:
                yield values[key]
            elif key in values:
                yield find_box(values[key], key, self.columns.box(number), layouts)
            else:
                # The planner of a writer process has the chunks of this rank, not the tensors.
                yield self._data(number)

    def _data(self, number: int) -> torch.Tensor | io.BytesIO:
        line = self.columns.item(number) if self._lines is None else self._lines[number]
        data: Any = self.planner.resolve_data(line)
        if not isinstance(data, torch.Tensor | io.BytesIO):
            raise InvalidPlanError(
                f"{line.index.fqn}: the planner gave a {type(data).__name__}, not a tensor or BytesIO",
                key=line.index.fqn,
            )
        return data

    @contextlib.contextmanager
    def _naming(self, numbers: Sequence[int]) -> Iterator[None]:
        """Say what was being written when the system or a store reports an error and knows only the file."""
        try:
            yield
        except StorageError as error:
            if error.key is not None:
                raise
            raise type(error)(f"{error} ({self._described(numbers)})", path=error.path) from error
        except OSError as error:
            if error.errno is None:
                raise
            text = f"{error.strerror} ({self._described(numbers)})"
            raise OSError(error.errno, text, error.filename) from error

    def _described(self, numbers: Sequence[int]) -> str:
        ends = dict.fromkeys(self.columns.keys[number] for number in [*numbers[:1], *numbers[-1:]])
        return f"while writing {' to '.join(ends)}"


def _deal(nbytes: Sequence[int], count: int) -> list[Sequence[int]]:
    """Lines in at most ``count`` groups of about the same number of bytes; no group is empty."""
    if not len(nbytes):
        # A file without items would be named by nobody, so that no later save could remove it.
        return []
    count = min(count, len(nbytes))
    if count == 1:
        return [range(len(nbytes))]
    return [group for group in deal_by_size([size + 1 for size in nbytes], count) if group]


def deal_by_size(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Numbers in ``count`` groups of about the same size together, the largest first.

    Of groups with the same size the first one is taken.
    """
    groups: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for line in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        so_far, number = heap[0]
        groups[number].append(line)
        heapq.heapreplace(heap, (so_far + sizes[line], number))
    return groups


def deal_neighbours(items: Sequence[T], sizes: Sequence[int], count: int) -> list[list[T]]:
    """Neighbours together, in ``count`` portions of about the same size; some may be empty."""
    portions: list[list[T]] = [[] for _ in range(count)]
    share, filled = max(1, sum(sizes)) / count, 0
    for item, size in zip(items, sizes, strict=True):
        portions[min(count - 1, int((filled + size / 2) / share))].append(item)
        filled += size
    return portions
