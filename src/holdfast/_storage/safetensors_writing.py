"""Owns writing the chunks of one rank into the files of a model: every run of bytes at its place."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch

from holdfast._format.item_table import StorageInfo
from holdfast._geometry import row_major_strides
from holdfast._io import pool
from holdfast._io.file_access import RangeWriter
from holdfast._io.local_buffers import BUFFER_NBYTES
from holdfast._io.pool import Cancellation
from holdfast._io.progress import ProgressTracker
from holdfast._io.range_ring import RANGE_BUFFERS, RangeRing
from holdfast._io.range_sums import RangeSums
from holdfast._io.store import ByteStore
from holdfast._storage.safetensors_layout import RankPlaces
from holdfast._storage.writing import deal_neighbours
from holdfast._tensors.host import host_pieces
from holdfast.errors import InvalidPlanError
from holdfast.planner import SavePlan, SavePlanner, WriteItem
from holdfast.storage import WriteResult

_RING = RANGE_BUFFERS * BUFFER_NBYTES
_SMALLEST_COPY, _LARGEST_COPY = 1 << 20, 16 << 20
"""Bytes of tensors that are cast, or are not contiguous, that are copied at a time."""


class ChunkPlace(NamedTuple):
    """Where the bytes of a chunk lie in its file, as runs of equal length.

    Attributes:
        begin: Where its tensor begins in the file.
        tensor_nbytes: The bytes of that tensor.
        starts: Where the runs begin in the tensor, in the order of the chunk's own bytes.
        run: How many bytes each of them has.
    """

    begin: int
    tensor_nbytes: int
    starts: Sequence[int]
    run: int

    @staticmethod
    def of(
        begin: int, shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], itemsize: int
    ) -> "ChunkPlace":
        """The place of a chunk, given by its box, of a tensor that begins at ``begin``."""
        strides = row_major_strides(shape)
        nbytes = torch.Size(shape).numel() * itemsize
        if 0 in lengths:
            return ChunkPlace(begin, nbytes, (), 0)
        # Dimensions that the chunk has all of are part of a run, and so is the one before them.
        split = len(shape)
        while split and lengths[split - 1] == shape[split - 1]:
            split -= 1
        split = max(split - 1, 0)
        starts = [sum(o * s for o, s in zip(offsets, strides, strict=True)) * itemsize]
        for length, stride in zip(lengths[:split], strides[:split], strict=True):
            starts = [start + n * stride * itemsize for start in starts for n in range(length)]
        return ChunkPlace(begin, nbytes, starts, torch.Size(lengths[split:]).numel() * itemsize)

    def sums(self) -> RangeSums:
        """Empty sums with room for the chunk."""
        return RangeSums(self.tensor_nbytes, self.starts[0], self.starts[-1] + self.run - 1)

    def cut(self, position: int, piece: memoryview) -> Iterator[tuple[int, memoryview]]:
        """The runs of a piece of the chunk, from ``position`` on: the place in the tensor, and the bytes."""
        at = 0
        while at < len(piece):
            number, inside = divmod(position + at, self.run)
            part = piece[at : at + self.run - inside]
            yield self.starts[number] + inside, part
            at += len(part)


class _Line(NamedTuple):
    """One item of the plan: where it goes, and how it is stored."""

    item: WriteItem
    file: int
    place: ChunkPlace
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return len(self.place.starts) * self.place.run


def write_chunks(
    store: ByteStore,
    plan: SavePlan,
    planner: SavePlanner,
    *,
    threads: int,
    budget: int,
    progress: ProgressTracker,
) -> list[WriteResult]:
    """Write chunks of a plan at their places; on return the bytes are on stable storage.

    Args:
        store: The folder. Its files have their sizes already.
        plan: What to write. Its ``storage_data`` are the ``RankPlaces`` of this rank.
        planner: Gives the data.
        threads: How many threads write, at most.
        budget: The most memory taken besides the state.
        progress: Is told of the bytes that were written. An exception that it raises stops the write.

    Returns:
        For each item where its tensor begins in which file. Its checksums are sums of the ranges that it has,
        see ``range_sums``.
    """
    places: RankPlaces = plan.storage_data
    lines = sorted(
        (_line_of(item, places) for item in plan.items),
        key=lambda line: (line.file, line.place.begin, list(line.place.starts[:1])),
    )
    threads = max(1, min(threads, budget // (_RING + _SMALLEST_COPY)))
    copy_at_once = max(_SMALLEST_COPY, min(_LARGEST_COPY, budget // threads - _RING))
    store.expect(sum(line.nbytes for line in lines))
    cancellation = Cancellation()

    def write(portion: Sequence[_Line]) -> list[WriteResult]:
        # Each thread has files of its own: what is known of a disk belongs to one stream of writes. They
        # are flushed when the ring has handed over all of it.
        with ExitStack() as stack:
            numbers = dict.fromkeys(line.file for line in portion)
            files = {
                number: stack.enter_context(store.open_ranges(places.files[number])) for number in numbers
            }
            ring = stack.enter_context(RangeRing(progress.advance))
            results = []
            for line in portion:
                cancellation.check()
                name = places.files[line.file]
                results.append(_write_line(line, files[line.file], name, planner, ring, copy_at_once))
        return results

    portions = deal_neighbours(lines, [line.nbytes for line in lines], threads)
    jobs = [partial(write, portion) for portion in portions if portion]
    written = pool.run(jobs, threads=threads, cancellation=cancellation)
    return [result for results in written for result in results]


def _line_of(item: WriteItem, places: RankPlaces) -> _Line:
    data = item.tensor_data
    assert data is not None, "what is no tensor is refused before"
    file, begin, name = places.places[item.index.fqn]
    dtype: torch.dtype = getattr(torch, name)
    chunk = data.chunk
    place = ChunkPlace.of(begin, data.size, chunk.offsets, chunk.sizes, dtype.itemsize)
    return _Line(item, file, place, dtype)


def _write_line(
    line: _Line, file: RangeWriter, name: str, planner: SavePlanner, ring: RangeRing, copy_at_once: int
) -> WriteResult:
    place, index = line.place, line.item.index
    if not place.starts:
        return WriteResult(index, 0, StorageInfo(name, place.begin, 0))
    sums, position = place.sums(), 0

    def add(offset: int, copy: memoryview) -> None:
        # What is summed is the copy: a tensor that somebody changes meanwhile still gives a file that
        # agrees with its checksums.
        sums.add(offset - place.begin, copy)

    for piece in cast_pieces(resolve(line.item, planner), line.dtype, copy_at_once):
        for at, run in place.cut(position, piece):
            ring.put(file, place.begin + at, run, add)
        position += len(piece)
    # The number of the first block tells where the sums belong.
    offset = place.begin + sums.first_block * sums.block_size
    return WriteResult(
        index, line.nbytes, StorageInfo(name, offset, line.nbytes, checksums=sums.sums.tobytes())
    )


def resolve(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    """The values of an item, in the shape that the plan has for it.

    Raises:
        InvalidPlanError: The planner gives something else.
    """
    assert item.tensor_data is not None
    key, shape = item.index.fqn, item.tensor_data.chunk.sizes
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor):
        raise InvalidPlanError(f"{key}: the planner gave a {type(tensor).__name__}", key=key)
    if tensor.numel() != shape.numel():
        found = tuple(tensor.shape)
        raise InvalidPlanError(
            f"{key}: the planner gave a tensor of shape {found}, and the plan has {tuple(shape)}", key=key
        )
    return tensor.detach().reshape(shape)


def cast_pieces(tensor: torch.Tensor, dtype: torch.dtype, max_bytes: int) -> Iterator[memoryview]:
    """The elements of a tensor, cast, in row-major order; what has to be copied is so in pieces."""
    tensor = tensor.detach()
    if tensor.dtype == dtype:
        yield from host_pieces(tensor, max_bytes)
    elif tensor.dim() == 0 or tensor.numel() * max(tensor.itemsize, dtype.itemsize) <= max_bytes:
        yield from host_pieces(tensor.to(dtype), max_bytes)
    else:
        row = tensor[0].numel() * max(tensor.itemsize, dtype.itemsize)
        rows = max(1, max_bytes // row)
        for start in range(0, tensor.shape[0], rows):
            part = tensor[start : start + rows]
            yield from cast_pieces(part[0] if rows == 1 else part, dtype, max_bytes)
