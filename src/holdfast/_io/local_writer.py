"""Owns the writing of one local file: past the page cache where that is possible, and on disk at the end."""

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Protocol

from holdfast._io.blocks import STEP, BlockSums
from holdfast._io.copying import copy_bytes
from holdfast._io.local_buffers import BUFFER_NBYTES, borrow, give_back
from holdfast._io.pool import Worker, wait_for_all
from holdfast._io.store import FileWriter

__all__ = ["LocalWriter", "flush_to_disk", "naming", "write_fully"]

RING = 4
"""Buffers of a ring: one being filled, one being written, two to even out a slow disk."""

PAGE = max(mmap.PAGESIZE, 4096)
"""Offsets and sizes past the page cache are multiples of this; no disk in use asks for more."""

_GATHER_BELOW = 64 << 10  # smaller pieces are gathered: thousands of system calls cost more than the copy

O_DIRECT: int = getattr(os, "O_DIRECT", 0)


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Name the file in an OSError of a call that knew only its descriptor."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename == path:
            raise
        raise OSError(error.errno, error.strerror, path) from error


def flush_to_disk(fd: int) -> None:
    """Return when the file's bytes are on stable storage. Must not be tried again after it failed."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # macOS: fsync leaves the bytes in the drive's own cache
    else:
        os.fsync(fd)


def write_fully(fd: int, pieces: Sequence["memoryview | bytearray"], offset: int) -> None:
    """Write all pieces one after the other from ``offset`` on, however little each call takes."""
    left = [memoryview(piece) for piece in pieces if len(piece)]
    while left:
        wrote = os.pwritev(fd, left, offset)
        if wrote == 0:
            raise OSError(errno.EIO, "The file system took no bytes and gave no reason")
        offset += wrote
        while left and wrote >= len(left[0]):
            wrote -= len(left.pop(0))
        if wrote:
            left[0] = left[0][wrote:]


def set_direct(fd: int, on: bool) -> bool:
    """Turn writing past the page cache on or off. False where the file system does not offer it."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | O_DIRECT if on else flags & ~O_DIRECT)
    except OSError as error:
        if on and error.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
            return False
        raise
    return bool(O_DIRECT)


class LocalWriter(FileWriter):
    """Writes one new file of a local file system.

    A durable file goes past the page cache, which takes less than half the CPU and does not push other
    things out of memory. It goes through the page cache and is flushed where the file system refuses
    that, and when the file is smaller than one buffer: up to there both take the same time.

    Args:
        path: The file, for messages and for removing it.
        fd: It, open for writing and empty. The writer owns the descriptor.
        durable: Whether ``finish`` waits for stable storage.
        direct: Whether to go past the page cache if possible.
    """

    def __init__(self, path: str, fd: int, *, durable: bool, direct: bool) -> None:
        super().__init__(path)
        self._fd = fd
        self._durable = durable
        self._sink: _Sink = _Ring(fd) if direct and set_direct(fd, on=True) else _Plain(fd)

    def _append(self, view: memoryview, sums: BlockSums | None) -> None:
        with naming(self.path):
            self._sink.append(view, sums)

    def _complete(self) -> None:
        with naming(self.path):
            self._sink.finish()
            if self._durable:
                flush_to_disk(self._fd)
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _discard(self) -> None:
        try:
            self._sink.abort()
        finally:
            try:
                # Before the close, so that dirty pages are dropped instead of being written.
                os.unlink(self.path)
            except OSError:
                pass  # a stray file is harmless, as no metadata names it; the first error must not be hidden
            if self._fd >= 0:
                fd, self._fd = self._fd, -1
                try:
                    os.close(fd)
                except OSError:
                    pass  # the file is gone, so nobody misses what could not be written


class _Sink(Protocol):
    """Where a LocalWriter's bytes go. Offsets begin at 0."""

    def append(self, view: memoryview, sums: BlockSums | None) -> None: ...
    def finish(self) -> None: ...
    def abort(self) -> None: ...


class _Plain:
    """Through the page cache: large pieces straight from the caller's memory, small ones gathered."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._offset = 0
        self._gathered = bytearray()

    def append(self, view: memoryview, sums: BlockSums | None) -> None:
        for at in range(0, len(view), STEP):
            piece = view[at : at + STEP]
            if sums is not None:
                sums.update(piece)
            if len(piece) < _GATHER_BELOW:
                self._gathered += piece
                piece = piece[:0]
            if len(piece) or len(self._gathered) >= STEP:
                self._flush(piece)

    def finish(self) -> None:
        self._flush(memoryview(b""))

    def abort(self) -> None:
        self._gathered = bytearray()

    def _flush(self, piece: memoryview) -> None:
        gathered, self._gathered = self._gathered, bytearray()
        write_fully(self._fd, [gathered, piece], self._offset)
        self._offset += len(gathered) + len(piece)


class _Ring:
    """Past the page cache: the caller fills page-aligned buffers while one thread writes full ones.

    The thread starts with the first full buffer, so a file smaller than one has none.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
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

    def finish(self) -> None:
        tail = bytearray()
        if self._current is not None:
            # The last bytes are no multiple of a page: they alone go through the page cache.
            whole = self._filled - self._filled % PAGE if self._thread else 0
            tail = bytearray(memoryview(self._current)[whole : self._filled])
            if whole:
                self._submit(self._current, whole)
        self._end_thread()
        self._raise_failure()
        self._give_back()
        set_direct(self._fd, on=False)
        write_fully(self._fd, [tail], self._offset)

    def abort(self) -> None:
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
                self._write(buffer, nbytes, offset)
                self._free.put(buffer)
        except BaseException as error:  # noqa: BLE001 - kept for the caller, whatever it is
            self._failure = error
            self._free.put(None)

    def _write(self, buffer: mmap.mmap, nbytes: int, offset: int) -> None:
        with memoryview(buffer)[:nbytes] as whole:
            try:
                write_fully(self._fd, [whole], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Some file systems accept O_DIRECT and then refuse the write. Through the page cache it
                # works; or it shows what was really wrong.
                set_direct(self._fd, on=False)
                write_fully(self._fd, [whole], offset)

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
