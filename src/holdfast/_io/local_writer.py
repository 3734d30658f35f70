"""Owns the writing of one local file: past the page cache where that is possible, and on disk at the end."""

import errno
import fcntl
import functools
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from holdfast._io.blocks import STEP, BlockSums
from holdfast._io.file_access import FileWriter
from holdfast._io.ring import BufferRing

PAGE = max(mmap.PAGESIZE, 4096)
"""Offsets and sizes past the page cache are multiples of this; no disk in use asks for more."""

O_DIRECT = os.O_DIRECT if sys.platform == "linux" else 0


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
    if sys.platform == "darwin":
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # fsync leaves the bytes in the drive's own cache
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
        self._ring: BufferRing | None = None
        if direct and set_direct(fd, on=True):
            self._ring = BufferRing(functools.partial(_write_direct, fd), unit=PAGE)

    def _append(self, view: memoryview, sums: BlockSums | None) -> None:
        with naming(self.path):
            if self._ring is not None:
                self._ring.append(view, sums)
                return
            for at in range(0, len(view), STEP):
                piece = view[at : at + STEP]
                if sums is not None:
                    sums.update(piece)
                write_fully(self._fd, [piece], self.position + at)

    def _complete(self) -> None:
        with naming(self.path):
            if self._ring is not None:
                tail, offset = self._ring.finish()
                # The last bytes, no whole page, go through the page cache.
                set_direct(self._fd, on=False)
                write_fully(self._fd, [tail], offset)
            if self._durable:
                flush_to_disk(self._fd)
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _discard(self) -> None:
        try:
            if self._ring is not None:
                self._ring.abort()
        finally:
            with suppress(OSError):  # a stray file is harmless: no metadata names it; the first error counts
                # Before the close, so that dirty pages are dropped instead of being written.
                os.unlink(self.path)
            fd, self._fd = self._fd, -1
            with suppress(
                OSError
            ):  # closed already; or the file is gone, and nobody misses what is not written
                os.close(fd)


def _write_direct(fd: int, whole: memoryview, offset: int) -> None:
    try:
        write_fully(fd, [whole], offset)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Some file systems accept O_DIRECT and then refuse the write. Through the page cache it works; or it
        # shows what was really wrong.
        set_direct(fd, on=False)
        write_fully(fd, [whole], offset)
