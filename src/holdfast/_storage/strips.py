"""Owns reading a box whose rows do not lie together: one pass of strips, each checked, then scattered."""

from typing import NamedTuple

import torch

from holdfast._geometry import row_major_strides
from holdfast._io.local_buffers import BUFFER_NBYTES, borrow, give_back
from holdfast._storage.destinations import Destination
from holdfast._storage.item_reader import Chunk, ItemReader

_STRIP = 4 << 20
"""Bytes read, checked and scattered at once: they stay in the processor's cache meanwhile. In new memory of
32 MiB, columns of 1 GiB took three times as long."""

_SMALL = 1 << 20
"""What is not larger is read at once, into memory of its size."""


class StoredRows(NamedTuple):
    """A piece of a box as equal rows of a payload, cut along one dimension.

    Attributes:
        dimension: The first dimension in which the piece is longer than one.
        total: How many rows there are.
        start: Where in the payload the first one begins.
        stride: How many bytes lie between the beginnings of two rows.
        nbytes: How many bytes there are from the first to the last element of a row.
    """

    dimension: int
    total: int
    start: int
    stride: int
    nbytes: int

    def begin(self, row: int) -> int:
        """The first byte of a row."""
        return self.start + row * self.stride

    def complete_before(self, end: int) -> int:
        """How many rows end at or before a byte."""
        return min(self.total, max(0, (end - self.start - self.nbytes) // self.stride + 1))


def rows_of(chunk: Chunk, lengths: tuple[int, ...], start: int, nbytes: int) -> StoredRows | None:
    """A piece of ``lengths`` that takes ``nbytes`` from ``start`` on, as rows; None if they do not fit."""
    dimension = next((d for d, length in enumerate(lengths) if length > 1), None)
    if dimension is None:
        return None
    count, stride = lengths[dimension], row_major_strides(chunk.shape)[dimension] * chunk.dtype.itemsize
    block = chunk.info.block_size if chunk.info.is_checked else 0
    # A strip is at least a block, and what is left of the row before comes on top.
    if nbytes <= _SMALL or block % chunk.dtype.itemsize or max(_STRIP, block) + stride > BUFFER_NBYTES:
        return None
    return StoredRows(dimension, count, start, stride, nbytes - (count - 1) * stride)


class StripRead(NamedTuple):
    """One piece of a box, to be read in strips.

    Attributes:
        reader: Reads the payload.
        chunk: What is stored.
        destination: Where the box goes.
        offsets: Where in the box the piece begins.
        lengths: How long it is in each dimension.
        rows: It, as rows.
    """

    reader: ItemReader
    chunk: Chunk
    destination: Destination
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    rows: StoredRows

    def deliver(self) -> None:
        """Read each block once, check it, and put the rows where they belong."""
        with self.reader.context.budget.hold(BUFFER_NBYTES):
            buffer = borrow()
            try:
                with memoryview(buffer) as memory:
                    self._read_through(memory, torch.frombuffer(buffer, dtype=torch.uint8))
            finally:
                give_back(buffer)

    def _read_through(self, memory: memoryview, content: torch.Tensor) -> None:
        """``memory`` has the payload's bytes from ``low`` to ``high``; rows before ``done`` are delivered."""
        rows = self.rows
        unit, end = self._unit_and_end()
        done, low, high = 0, 0, 0
        while done < rows.total:
            begin = rows.begin(done)
            if high > begin:
                memory[: high - begin] = memory[begin - low : high - low]
                low = begin
            else:
                low = high = begin - begin % unit
            stop = min(end, max((high + _STRIP) // unit, high // unit + 1) * unit)
            self.reader.read(high, memory[high - low : stop - low])
            high = stop
            ready = rows.complete_before(high)
            if ready > done:
                self._put(content[rows.begin(done) - low : high - low], done, ready)
                done = ready

    def _unit_and_end(self) -> tuple[int, int]:
        """What reads are multiples of, so that no block is read twice to be checked; and where they end."""
        info, last = self.chunk.info, self.rows.begin(self.rows.total - 1) + self.rows.nbytes
        if not self.reader.is_verified:
            return 1, last
        rounded = min(info.payload_nbytes, -(-last // info.block_size) * info.block_size)
        # A box that reaches beyond the payload is refused by the read that does so, too.
        return info.block_size, max(last, rounded)

    def _put(self, content: torch.Tensor, first: int, stop: int) -> None:
        """Put some rows, of which the first one begins with ``content``, where they belong."""
        dimension, itemsize = self.rows.dimension, self.chunk.dtype.itemsize
        elements = content[: len(content) // itemsize * itemsize].view(self.chunk.dtype)
        lengths, offsets = list(self.lengths), list(self.offsets)
        lengths[dimension] = stop - first
        offsets[dimension] += first
        self.destination.put(
            tuple(offsets), elements.as_strided(lengths, row_major_strides(self.chunk.shape))
        )
