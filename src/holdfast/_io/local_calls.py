"""Owns system calls on an open local file: whole writes, flushes, write-back, past the page cache or not."""

import ctypes
import errno
import fcntl
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

PAGE = max(mmap.PAGESIZE, 4096)
"""Offsets and sizes past the page cache are multiples of this; no disk in use asks for more."""

O_DIRECT = os.O_DIRECT if sys.platform == "linux" else 0

_START, _WAIT = 2, 7  # of sync_file_range: start writing; wait for what is being written, start, wait
_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


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


def start_write_back(fd: int, offset: int, nbytes: int) -> None:
    """Have the disk begin with dirty bytes of the page cache, where the system can be asked."""
    _call_sync_file_range(fd, offset, nbytes, _START)


def await_write_back(fd: int, offset: int, nbytes: int) -> None:
    """Return when these bytes have left for the disk. They are on stable storage only after a flush.

    Raises:
        OSError: They could not be written. The flush of the same descriptor need not tell it again.
    """
    _call_sync_file_range(fd, offset, nbytes, _WAIT)


def drop_pages(fd: int, offset: int, nbytes: int) -> None:
    """Let the page cache forget clean bytes, where the system can be asked. 0 bytes: all to the end."""
    if sys.platform == "linux":
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _call_sync_file_range(fd: int, offset: int, nbytes: int, flags: int) -> None:
    if _sync_file_range is None or _sync_file_range(fd, offset, nbytes, flags) == 0:
        return
    number = ctypes.get_errno()
    if number not in {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:
        raise OSError(number, os.strerror(number))
