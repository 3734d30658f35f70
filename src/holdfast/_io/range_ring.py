"""Owns the ring of buffers through which one thread writes ranges of files while another fills them."""

import mmap
from collections.abc import Callable, Iterator

from typing_extensions import Self

from holdfast._io.file_access import RangeWriter
from holdfast._io.local_buffers import BUFFER_NBYTES
from holdfast._io.local_calls import PAGE
from holdfast._io.ring import BufferThread
from holdfast._io.streams import copy_bytes

RANGE_BUFFERS = 3
"""Buffers of a ring: one being filled, one being written, one to even out a slow disk."""

_SMALL = 256 << 10
"""Smaller ranges are written by the thread that fills: handing them over would take longer."""

_Range = tuple[RangeWriter, int, mmap.mmap, int]


class RangeRing:
    """Gathers bytes that follow each other in a file, and has them written by a thread of its own.

    Bytes have the same place in a page of memory as in a page of the file, so that a writer may pass whole
    pages to the disk as they are. Every buffer but the last one of a run ends with a page of the file.

    Use it in a with-block: when that ends, all is handed to the files. It does not finish them.

    Args:
        progress: Called with the size of each range that was written, by the thread that fills.
    """

    def __init__(self, progress: Callable[[int], None]) -> None:
        self._progress = progress
        self._file: RangeWriter | None = None
        self._start = 0  # in the file, of the bytes in the buffer
        self._stop = 0
        self._buffer: mmap.mmap | None = None
        self._thread = BufferThread[_Range](self._write_all, name="holdfast-ranges", count=RANGE_BUFFERS)

    def put(
        self, file: RangeWriter, offset: int, view: memoryview, seen: Callable[[int, memoryview], None]
    ) -> None:
        """Copy bytes that belong at ``offset`` of a file, and have the copy written.

        Args:
            file: The file.
            offset: Where in it they belong.
            view: The bytes.
            seen: Called with each part of the copy, after where in the file it belongs.

        Raises:
            BaseException: An earlier range could not be written.
        """
        done = 0
        while done < len(view):
            slot = self._room(file, offset + done, len(view) - done)
            copy_bytes(slot, view[done : done + len(slot)])
            seen(offset + done, slot)
            done += len(slot)

    def _room(self, file: RangeWriter, offset: int, nbytes: int) -> memoryview:
        """Memory for bytes of a file from ``offset`` on: as many as fit, at most ``nbytes``."""
        if file is not self._file or offset != self._stop or self._stop - self._base == BUFFER_NBYTES:
            self._flush()
            self._file, self._start, self._stop = file, offset, offset
        if self._buffer is None:
            self._buffer = self._thread.next_buffer()
        begin = self._stop - self._base
        step = min(nbytes, BUFFER_NBYTES - begin)
        self._stop += step
        return memoryview(self._buffer)[begin : begin + step]

    @property
    def _base(self) -> int:
        """The place in the file that the buffer begins with."""
        return self._start - self._start % PAGE

    def _flush(self) -> None:
        """Write what was gathered, or have the thread do it."""
        if self._buffer is None or self._file is None:
            return
        nbytes = self._stop - self._start
        if nbytes < _SMALL:
            self._write(self._file, self._start, self._buffer, self._stop)
        else:
            self._thread.submit((self._file, self._start, self._buffer, self._stop))
            self._buffer = None
        self._start = self._stop
        self._progress(nbytes)

    @staticmethod
    def _write(file: RangeWriter, start: int, buffer: mmap.mmap, stop: int) -> None:
        begin = start % PAGE
        with memoryview(buffer)[begin : begin + stop - start] as view:
            file.write_at(start, view)

    def _write_all(self, ranges: Iterator[_Range]) -> None:
        for file, start, buffer, stop in ranges:
            self._write(file, start, buffer, stop)
            self._thread.release(buffer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
        finally:
            self._thread.end()
        if kind is None:
            self._thread.raise_failure()
            self._thread.give_back()
