"""Owns the ring of buffers that overlaps filling and writing: for local files, and for uploads in parts."""

import mmap
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar

from holdfast._io.blocks import BlockSums
from holdfast._io.local_buffers import BUFFER_NBYTES, borrow, give_back
from holdfast._io.pool import Worker, wait_for_all
from holdfast._io.streams import copy_bytes

RING = 4
"""Buffers of a ring for a disk: one being filled, one being written, two to even out a slow disk."""


class FullBuffer(NamedTuple):
    """Bytes of a file that are ready to be written.

    Attributes:
        view: The bytes. The writer must release the view before it calls ``release``.
        offset: Where in the file they belong.
        release: Gives the memory back to the ring; from any thread, also while an object is being finalized.
    """

    view: memoryview
    offset: int
    release: Callable[[], None]


Drain = Callable[[Iterator[FullBuffer]], None]
"""Writes all full buffers of a file, in order, and releases each when its bytes are written."""


class RingStoppedError(Exception):
    """Raised to a ``Drain`` in the place of the next buffer: the file is given up."""


def write_each(write: Callable[[memoryview, int], None]) -> Drain:
    """A ``Drain`` that writes one buffer after the other with ``write(view, offset)``."""

    def drain(buffers: Iterator[FullBuffer]) -> None:
        for buffer in buffers:
            with buffer.view:
                write(buffer.view, buffer.offset)
            buffer.release()

    return drain


J = TypeVar("J")
_Job = tuple[mmap.mmap, int, int]
"""A full buffer, how much of it is to be written, and where."""


class BufferThread(Generic[J]):
    """Page-aligned buffers that the caller fills, and the thread that writes them.

    The thread starts with the first job, so that little work needs none.

    Args:
        work: Carries out all jobs that were submitted, in order, and releases the buffer of each; called
            once, by the thread.
        name: The name of the thread.
        count: How many buffers there are at most. ``work`` must not keep all of them and wait for another.

    Attributes:
        is_running: Whether there is a thread.
    """

    def __init__(self, work: Callable[[Iterator[J]], None], *, name: str, count: int) -> None:
        self._work = work
        self._name = name
        self._count = count
        self._borrowed: list[mmap.mmap] = []
        self._free: SimpleQueue[mmap.mmap | None] = SimpleQueue()
        self._jobs: SimpleQueue[J | None] = SimpleQueue()
        self._thread: Worker | None = None
        self._failure: BaseException | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    def next_buffer(self) -> mmap.mmap:
        """A buffer to be filled. Waits if all are on their way; raises what ``work`` raised."""
        self.raise_failure()
        if self._free.empty() and len(self._borrowed) < self._count:
            self._borrowed.append(borrow())
            return self._borrowed[-1]
        buffer = self._free.get()
        if buffer is None:
            self.raise_failure()
        assert buffer is not None, "the thread ended without a reason"
        return buffer

    def release(self, buffer: mmap.mmap) -> None:
        """Let a buffer be filled again; from any thread, also while an object is being finalized."""
        self._free.put(buffer)

    def submit(self, job: J) -> None:
        """Have the thread do a job."""
        if self._thread is None:
            self._thread = Worker(self._run, name=self._name)
            self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        try:
            self._work(iter(self._jobs.get, None))  # ends at None
        except BaseException as error:  # noqa: BLE001 - kept for the caller, whatever it is
            self._failure = error
            self._free.put(None)

    def raise_failure(self) -> None:
        """Raise what ``work`` raised, if it did."""
        if self._failure is not None:
            self.end()
            raise self._failure

    def end(self) -> None:
        """Return when all jobs are done and the thread has ended."""
        if self._thread is not None:
            self._jobs.put(None)
            wait_for_all([self._thread])
            self._thread = None

    def give_back(self) -> None:
        """Return the buffers, of which no view is in use any more."""
        while self._borrowed:
            give_back(self._borrowed.pop())

    def forget(self) -> None:
        """Let go of the buffers without giving them back: somebody may still look at one."""
        self._borrowed.clear()


class BufferRing:
    """The bytes of one file on their way out: the caller fills buffers while one thread writes full ones.

    A file smaller than a buffer needs no thread.

    Args:
        drain: Writes the full buffers; called once, by the thread. The offsets are multiples of
            ``BUFFER_NBYTES``, and every view but the last has that size.
        unit: What the size of the last view is a multiple of.
        count: How many buffers there are at most. ``drain`` must not keep all of them and wait for another.
    """

    def __init__(self, drain: Drain, *, unit: int, count: int = RING) -> None:
        self._drain = drain
        self._unit = unit
        self._offset = 0  # in the file, of the buffer being filled
        self._current: mmap.mmap | None = None
        self._filled = 0
        self._stopped = False
        self._thread = BufferThread[_Job](self._write, name="holdfast-writer", count=count)

    def append(self, view: memoryview, sums: BlockSums | None) -> None:
        """Copy all of ``view`` into buffers, and feed the copies to ``sums`` if there is one.

        Raises:
            BaseException: What ``drain`` raised, of this piece or an earlier one.
        """
        at = 0
        while at < len(view):
            if self._current is None:
                self._current, self._filled = self._thread.next_buffer(), 0
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
        self._thread.raise_failure()

    def finish(self) -> tuple[bytearray, int]:
        """Have everything written but the last bytes, which are no whole unit.

        Returns:
            Those bytes and their offset. Of a file that has filled no buffer, these are all its bytes.
        """
        tail = bytearray()
        if self._current is not None:
            whole = self._filled - self._filled % self._unit if self._thread.is_running else 0
            tail = bytearray(memoryview(self._current)[whole : self._filled])
            if whole:
                self._submit(self._current, whole)
        self._thread.end()
        self._thread.raise_failure()
        self._thread.give_back()
        self._current = None
        return tail, self._offset

    def abort(self) -> None:
        """End the thread after the view that it is writing, and let go of the buffers."""
        self._stopped = True
        self._thread.end()
        # Not given back: a request that was given up may still look at one.
        self._thread.forget()
        self._current = None

    def _submit(self, buffer: mmap.mmap, nbytes: int) -> None:
        self._thread.submit((buffer, nbytes, self._offset))
        self._offset += nbytes
        self._current = None

    def _write(self, jobs: Iterator[_Job]) -> None:
        self._drain(self._full_buffers(jobs))

    def _full_buffers(self, jobs: Iterator[_Job]) -> Iterator[FullBuffer]:
        """What ``drain`` gets. A file that is given up ends with an error: a short one must not be made."""
        for buffer, nbytes, offset in jobs:
            if self._stopped:
                break
            yield FullBuffer(memoryview(buffer)[:nbytes], offset, partial(self._thread.release, buffer))
        if self._stopped:
            raise RingStoppedError
