"""Owns reading a box of a stored chunk by ranges: which ones it needs, and where each goes."""

from collections.abc import Iterator
from typing import NamedTuple

from holdfast._byte_ranges import SCRATCH, ByteRange, ranges_of
from holdfast._contents.box_target import StoredBox
from holdfast._contents.item_bytes import ItemBytes, new_memory
from holdfast._contents.strips import StripRead, rows_of
from holdfast._contents.whole_rows import WholeRows, is_read_whole, whole_rows
from holdfast._format.description import ints
from holdfast._format.item_table import Payload
from holdfast._io.blocks import crc32
from holdfast._io.streams import copy_bytes

# One thread reads a large run in pieces of this, so that several share a single large tensor.
_PIECE = 32 * 1024 * 1024


def ranges_for(item: ItemBytes, stored: StoredBox) -> Iterator[ByteRange]:
    """The ranges of the box that is wanted of a chunk, in the order of the file."""
    offsets, lengths = stored.box
    shape, itemsize, store = stored.shape, stored.itemsize, item.context.store
    block_size = stored.info.block_size
    if store.reads_whole_rows:
        if is_read_whole(shape, lengths, itemsize, store.traits.request_nbytes):
            before = sum(o * s for o, s in zip(offsets, stored.strides, strict=True))
            at = (0,) * len(lengths)
            return iter([ByteRange(at, lengths, 0, stored.nbytes, is_run=False, skipped=before)])
        rows = whole_rows(shape, offsets, lengths, itemsize, block_size)
        if rows is not None:
            return _ranges_of_rows(stored, rows, is_checked=item.is_verified)
    block, thrift = block_size if item.is_verified else 0, item.context.thrift
    return ranges_of(stored.strides, offsets, lengths, itemsize, run_limit=_PIECE, block=block, thrift=thrift)


def _ranges_of_rows(stored: StoredBox, rows: WholeRows, *, is_checked: bool) -> Iterator[ByteRange]:
    """The same ranges of whole rows on every rank, each with what this rank needs of them."""
    offsets, lengths = stored.box
    columns, itemsize = rows.columns, stored.itemsize
    unit = stored.info.block_size if is_checked else 1
    strides = stored.strides
    before = sum(o * s for o, s in zip(offsets[columns:], strides[columns:], strict=True))
    # A row is shorter than SCRATCH, so that none is cut.
    runs = ranges_of(
        stored.strides, rows.offsets, rows.lengths, itemsize, run_limit=SCRATCH, block=0, only_runs=True
    )
    for run in runs:
        start = run.start - run.start % unit
        end = min(stored.nbytes, -(-(run.start + run.nbytes) // unit) * unit)
        yield ByteRange(
            run.offsets,
            (*run.lengths[:columns], *lengths[columns:]),
            start,
            end - start,
            is_run=False,
            skipped=(run.start - start) // itemsize + before,
        )


class RangeRead(NamedTuple):
    """One range, to be read and put where it belongs: straight into the memory where that can be."""

    item: ItemBytes
    stored: StoredBox
    range: ByteRange

    def deliver(self, checksum: int | None = None) -> int:
        """Read it and put it where it belongs; go on with a running CRC-32 of all ranges, if one is given."""
        piece, item, target = self.range, self.item, self.stored.target
        content = self._own_memory()
        if content is not None:
            target.touch()
            item.read(piece.start, content)
            return 0 if checksum is None else crc32(content, checksum)
        # Ranks that read together read in the same portions, whatever each does with them.
        is_for_this_rank = checksum is None and not item.context.store.reads_whole_rows
        as_rows = rows_of(self.stored, piece) if is_for_this_rank else None
        if as_rows is not None:
            StripRead(item, self.stored, piece, as_rows).deliver()
            return 0
        with item.context.budget.hold(piece.nbytes):
            content = new_memory(piece.nbytes)
            item.read(piece.start, content)
            self._put(content)
            return 0 if checksum is None else crc32(content, checksum)

    def deliver_from(self, content: memoryview) -> None:
        """Put it where it belongs, out of memory that has all of its ``source``, checked."""
        piece = self.range
        begin = piece.start % self._unit
        content = content[begin : begin + piece.nbytes]
        memory = self._own_memory()
        if memory is not None:
            self.stored.target.touch()
            copy_bytes(memory, content)
        else:
            self._put(content)

    def _put(self, content: memoryview) -> None:
        piece, strides = self.range, self.stored.strides
        self.stored.target.put(piece.offsets, piece.lengths, content, strides, piece.skipped or 0)

    def _own_memory(self) -> memoryview | None:
        """The target's bytes for this range, if they are one run on both sides."""
        piece, stored = self.range, self.stored
        if not piece.is_run:
            return None
        return stored.target.memory_for(piece.offsets, piece.lengths, stored.itemsize)

    @property
    def _unit(self) -> int:
        """What is read is a multiple of this, so that it can be checked."""
        return self.stored.info.block_size if self.item.is_verified else 1

    def source(self) -> Payload | None:
        """What is read of the file for it, with its checksums; None if the metadata is damaged."""
        info, unit, is_verified = self.stored.info, self._unit, self.item.is_verified
        first, last = self.range.start // unit, -(-(self.range.start + self.range.nbytes) // unit)
        start, end = first * unit, min(info.payload_nbytes, last * unit)
        crcs = ints(info.checksums, "I")[first:last] if is_verified else ()
        if end < self.range.start + self.range.nbytes or len(crcs) != is_verified * (last - first):
            return None
        return Payload(info.offset + info.payload_offset + start, end - start, crcs, unit)
