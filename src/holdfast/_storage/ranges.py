"""Owns reading boxes of stored tensors: which byte ranges of a payload a box needs, and where each goes."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from holdfast._byte_ranges import SCRATCH, ByteRange, ranges_of
from holdfast._format.description import ints
from holdfast._format.item_table import Payload
from holdfast._geometry import row_major_strides, volume
from holdfast._io.blocks import crc32
from holdfast._io.copying import copy_bytes
from holdfast._storage.destinations import Destination
from holdfast._storage.item_reader import Chunk, ItemReader
from holdfast._storage.strips import StripRead, rows_of
from holdfast._storage.whole_rows import WholeRows, is_read_whole, whole_rows
from holdfast._tensors.host import memory_of


def ranges_for(
    chunk: Chunk,
    destination: Destination,
    run_limit: int,
    *,
    is_checked: bool = False,
    reads_whole_rows: bool = False,
    request_nbytes: int = 0,
) -> Iterator[ByteRange]:
    """The ranges of the box that is wanted of a chunk, in the order of the file.

    Args:
        chunk: What is stored.
        destination: Where the box goes.
        run_limit: The most bytes of a range that is one run.
        is_checked: Whether every block that a range has a part of is read, to be checked.
        reads_whole_rows: Whether other ranks that need other columns of the same rows read with this one.
        request_nbytes: How many bytes a request should ask for, as the store's traits have it.
    """
    item = destination.item
    offsets, lengths, itemsize = tuple(item.storage_offsets), tuple(item.lengths), chunk.dtype.itemsize
    block_size = chunk.info.block_size
    if reads_whole_rows:
        if is_read_whole(chunk.shape, lengths, itemsize, request_nbytes):
            strides = row_major_strides(chunk.shape)
            before = sum(o * s for o, s in zip(offsets, strides, strict=True))
            at = (0,) * len(lengths)
            return iter([ByteRange(at, lengths, 0, chunk.nbytes, is_run=False, skipped=before)])
        rows = whole_rows(chunk.shape, offsets, lengths, itemsize, block_size)
        if rows is not None:
            return _ranges_of_rows(chunk, rows, offsets, lengths, is_checked=is_checked)
    return ranges_of(
        chunk.shape, offsets, lengths, itemsize, run_limit=run_limit, block=block_size if is_checked else 0
    )


def _ranges_of_rows(
    chunk: Chunk, rows: WholeRows, offsets: tuple[int, ...], lengths: tuple[int, ...], *, is_checked: bool
) -> Iterator[ByteRange]:
    """The same ranges of whole rows on every rank, each with what this rank needs of them."""
    columns, itemsize = rows.columns, chunk.dtype.itemsize
    unit = chunk.info.block_size if is_checked else 1
    strides = row_major_strides(chunk.shape)
    before = sum(o * s for o, s in zip(offsets[columns:], strides[columns:], strict=True))
    # A row is shorter than SCRATCH, so that none is cut.
    runs = ranges_of(
        chunk.shape, rows.offsets, rows.lengths, itemsize, run_limit=SCRATCH, block=0, only_runs=True
    )
    for run in runs:
        start = run.start - run.start % unit
        end = min(chunk.nbytes, -(-(run.start + run.nbytes) // unit) * unit)
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

    reader: ItemReader
    chunk: Chunk
    destination: Destination
    range: ByteRange

    def deliver(self, checksum: int | None = None) -> int:
        """Read it and put it where it belongs; go on with a running CRC-32 of all ranges, if one is given."""
        piece, chunk = self.range, self.chunk
        memory = self._own_memory()
        if memory is not None:
            self.destination.touch()
            self.reader.read(piece.start, memory)
            return 0 if checksum is None else crc32(memory, checksum)
        # Ranks that read together read in the same portions, whatever each does with them.
        is_for_this_rank = checksum is None and not self.reader.file.store.reads_whole_rows
        as_rows = rows_of(chunk, piece.lengths, piece.start, piece.nbytes) if is_for_this_rank else None
        if as_rows is not None:
            parts = self.reader, chunk, self.destination, piece.offsets, piece.lengths
            StripRead(*parts, as_rows).deliver()
            return 0
        with self.reader.context.budget.hold(piece.nbytes):
            scratch = torch.empty(piece.nbytes // chunk.dtype.itemsize, dtype=chunk.dtype)
            content = memory_of(scratch)
            self.reader.read(piece.start, content)
            self._put(scratch)
            return 0 if checksum is None else crc32(content, checksum)

    def deliver_from(self, content: memoryview) -> None:
        """Put it where it belongs, out of memory that has all of its ``source``, checked."""
        piece = self.range
        begin = piece.start % self._unit
        content = content[begin : begin + piece.nbytes]
        memory = self._own_memory()
        if memory is not None:
            self.destination.touch()
            copy_bytes(memory, content)
        else:
            self._put(torch.frombuffer(content, dtype=torch.uint8).view(self.chunk.dtype))

    def _put(self, elements: torch.Tensor) -> None:
        piece = self.range
        rows = elements.as_strided(piece.lengths, row_major_strides(self.chunk.shape), piece.skipped or 0)
        self.destination.put(piece.offsets, rows)

    @property
    def _unit(self) -> int:
        """What is read is a multiple of this, so that it can be checked."""
        return self.chunk.info.block_size if self.reader.is_verified else 1

    def source(self) -> Payload | None:
        """What is read of the file for it, with its checksums; None if the metadata is damaged."""
        info, unit, is_verified = self.chunk.info, self._unit, self.reader.is_verified
        first, last = self.range.start // unit, -(-(self.range.start + self.range.nbytes) // unit)
        start, end = first * unit, min(info.payload_nbytes, last * unit)
        crcs = ints(info.checksums, "I")[first:last] if is_verified else ()
        if end < self.range.start + self.range.nbytes or len(crcs) != is_verified * (last - first):
            return None
        return Payload(info.offset + info.payload_offset + start, end - start, crcs, unit)

    def _own_memory(self) -> memoryview | None:
        """The destination's bytes for this range, if they are one run on both sides."""
        piece = self.range
        memory = self.destination.memory() if piece.is_run else None
        if memory is None or len(memory) == piece.nbytes:
            return memory
        strides = row_major_strides(tuple(self.destination.item.lengths))
        reach = sum((n - 1) * s for n, s in zip(piece.lengths, strides, strict=True))
        if reach + 1 != volume(piece.lengths):
            return None
        start = sum(o * s for o, s in zip(piece.offsets, strides, strict=True)) * self.chunk.dtype.itemsize
        return memory[start : start + piece.nbytes]
