"""Owns the ring of buffers that overlaps filling and writing: for local files, and for uploads in parts."""

import mmap
from collections.abc import Callable
from queue import SimpleQueue

from holdfast._io.blocks import BlockSums
from holdfast._io.copying import copy_bytes
from holdfast._io.local_buffers import BUFFER_NBYTES, borrow, give_back
from holdfast._io.pool import Worker, wait_for_all

RING = 4
"""Buffers of a ring: one being filled, one being written, two to even out a slow disk."""


class BufferRing:
    """The bytes of one file on their way out: the caller fills buffers while one thread writes full ones.

    The buffers are page-aligned. The thread starts with the first full buffer, so a file smaller than one
    has none.

    Args:
        write: Writes all of a view at an offset of the file; called by the thread. The offsets are multiples
            of ``BUFFER_NBYTES``, and every view but the last has that size.
        unit: What the size of the last view is a multiple of.
    """

    def __init__(self, write: Callable[[memoryview, int], None], *, unit: int) -> None:
        self._write = write
        self._unit = unit
        self._offset = 0  # in the file, of the buffer being filled
        self._current: mmap.mmap | None = None
        self._filled = 0
        self._borrowed: list[mmap.mmap] = []
        self._free: SimpleQueue[mmap.mmap | None] = SimpleQueue()
        self._full: SimpleQueue[tuple[mmap.mmap, int, int] | None] = SimpleQueue()
        self._thread: Worker | None = None
        self._failure: BaseException | None = None
        self._stopped = False

    def append(self, view: memoryview, sums: BlockSums | None) -> None:
        """Copy all of ``view`` into buffers, and feed the copies to ``sums`` if there is one.

        Raises:
            BaseException: What ``write`` raised, of this piece or an earlier one.
        """
        at = 0
        while at < len(view):
            if self._current is None:
                self._current, self._filled = self._next_buffer(), 0
            # In one step: beside a busy thread of Python the lock that this one needs after each step takes
            # 5 ms to get. Copying 1 MiB at a time is 1.1 times as fast where nobody is there.
            step = min(BUFFER_NBYTES - self._filled, len(view) - at)
            with memoryview(self._current)[self._filled : self._filled + step] as slot:
                copy_bytes(slot, view[at : at + step])
                if sums is not None:
                    # Of the copy, not of the source: a tensor that somebody changes meanwhile still
                    # gives a file that agrees with its checksums.
                    sums.update(slot)
            at += step
            self._filled += step
            if self._filled == BUFFER_NBYTES:
                self._submit(self._current, BUFFER_NBYTES)
        self._raise_failure()

    def finish(self) -> tuple[bytearray, int]:
        """Have everything written but the last bytes, which are no whole unit.

        Returns:
            Those bytes and their offset. Of a file that has filled no buffer, these are all its bytes.
        """
        tail = bytearray()
        if self._current is not None:
            whole = self._filled - self._filled % self._unit if self._thread else 0
            tail = bytearray(memoryview(self._current)[whole : self._filled])
            if whole:
                self._submit(self._current, whole)
        self._end_thread()
        self._raise_failure()
        self._give_back()
        return tail, self._offset

    def abort(self) -> None:
        """End the thread after the view that it is writing, and free the buffers."""
        self._stopped = True
        self._end_thread()
        self._give_back()

    def _next_buffer(self) -> mmap.mmap:
        if self._free.empty() and len(self._borrowed) < RING:
            self._borrowed.append(borrow())
            return self._borrowed[-1]
        buffer = self._free.get()
        if buffer is None:
            self._raise_failure()
        assert buffer is not None, "the thread ended without a reason"
        return buffer

    def _submit(self, buffer: mmap.mmap, nbytes: int) -> None:
        if self._thread is None:
            self._thread = Worker(self._write_full_buffers, name="holdfast-writer")
            self._thread.start()
        self._full.put((buffer, nbytes, self._offset))
        self._offset += nbytes
        self._current = None

    def _write_full_buffers(self) -> None:
        try:
            while (job := self._full.get()) is not None and not self._stopped:
                buffer, nbytes, offset = job
                with memoryview(buffer)[:nbytes] as whole:
                    self._write(whole, offset)
                self._free.put(buffer)
        except BaseException as error:  # noqa: BLE001 - kept for the caller, whatever it is
            self._failure = error
            self._free.put(None)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._end_thread()
            raise self._failure

    def _end_thread(self) -> None:
        if self._thread is not None:
            self._full.put(None)
            wait_for_all([self._thread])
            self._thread = None

    def _give_back(self) -> None:
        while self._borrowed:
            give_back(self._borrowed.pop())
        self._current = None
