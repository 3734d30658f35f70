"""Owns reading a box whose rows do not lie together: one pass of strips, each checked, then scattered."""

from typing import NamedTuple

from holdfast._byte_ranges import ByteRange
from holdfast._contents.box_target import StoredBox
from holdfast._contents.item_bytes import ItemBytes
from holdfast._geometry import outermost
from holdfast._io.local_buffers import BUFFER_NBYTES, borrow, give_back

_STRIP = 4 << 20
"""Bytes read, checked and scattered at once: they stay in the processor's cache meanwhile. In new memory of
32 MiB, columns of 1 GiB took three times as long."""

_SMALL = 1 << 20
"""Pieces up to this size are read at once, into memory of their size."""


class StoredRows(NamedTuple):
    """A piece of a box as equal rows of a payload, cut along one dimension.

    Attributes:
        dimension: The dimension that it is cut along.
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


def rows_of(stored: StoredBox, piece: ByteRange) -> StoredRows | None:
    """A piece as rows; None if they do not fit."""
    lengths, start, nbytes = piece.lengths, piece.start, piece.nbytes
    dimension = outermost(lengths, stored.strides)
    if dimension is None:
        return None
    count, stride = lengths[dimension], stored.strides[dimension] * stored.itemsize
    block = stored.info.block_size if stored.info.is_checked else 0
    # A strip is at least a block, and what is left of the row before comes on top.
    if nbytes <= _SMALL or block % stored.itemsize or max(_STRIP, block) + stride > BUFFER_NBYTES:
        return None
    return StoredRows(dimension, count, start, stride, nbytes - (count - 1) * stride)


class StripRead(NamedTuple):
    """One piece of a box, to be read in strips.

    Attributes:
        item: Reads the payload.
        stored: The box, and where it goes.
        piece: The piece.
        rows: It, as rows.
    """

    item: ItemBytes
    stored: StoredBox
    piece: ByteRange
    rows: StoredRows

    def deliver(self) -> None:
        """Read each block once, check it, and put the rows where they belong."""
        with self.item.context.budget.hold(BUFFER_NBYTES):
            buffer = borrow()
            try:
                with memoryview(buffer) as memory:
                    self._read_through(memory)
            finally:
                give_back(buffer)

    def _read_through(self, memory: memoryview) -> None:
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
            self.item.read(high, memory[high - low : stop - low])
            high = stop
            ready = rows.complete_before(high)
            if ready > done:
                self._put(memory[rows.begin(done) - low : high - low], done, ready)
                done = ready

    def _unit_and_end(self) -> tuple[int, int]:
        """What reads are multiples of, so that no block is read twice to be checked; and where they end."""
        info, last = self.stored.info, self.rows.begin(self.rows.total - 1) + self.rows.nbytes
        if not self.item.is_verified:
            return 1, last
        rounded = min(info.payload_nbytes, -(-last // info.block_size) * info.block_size)
        # A box that reaches beyond the payload is refused by the read that does so, too.
        return info.block_size, max(last, rounded)

    def _put(self, content: memoryview, first: int, stop: int) -> None:
        """Put some rows, of which the first one begins with ``content``, where they belong."""
        dimension = self.rows.dimension
        lengths, offsets = list(self.piece.lengths), list(self.piece.offsets)
        lengths[dimension] = stop - first
        offsets[dimension] += first
        self.stored.target.put(tuple(offsets), tuple(lengths), content, self.stored.strides, 0)
