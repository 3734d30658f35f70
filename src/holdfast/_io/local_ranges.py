"""Owns local files that several processes write together: each the ranges that it has."""

import errno
import os
import stat
from contextlib import suppress

from holdfast._io.file_access import RangeWriter
from holdfast._io.local_calls import PAGE, flush_to_disk, naming, write_fully
from holdfast._io.store import taken_name
from holdfast._io.write_back import BufferOutput
from holdfast.errors import CheckpointNotFoundError, StorageError

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_LARGE = 1 << 20
"""From this on a range is handed to the disk at once. Smaller ones would cost a call more each."""
_NO_RANGES = {
    errno.EPERM,
    errno.EACCES,
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ESPIPE,
    errno.EBADF,
}
"""What mounts of object stores answer to whoever does not write a file once from front to back."""
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class LocalRangeWriter(RangeWriter):
    """Writes ranges of a local file through the page cache, which is shared by the processes of a machine.

    Args:
        path: The file, for messages.
        fd: It, open for writing. The writer owns the descriptor.
    """

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd
        nbytes = os.fstat(fd).st_size
        self._output = BufferOutput(fd, "keep", nbytes, nbytes)

    def write_at(self, offset: int, view: memoryview) -> None:
        """Write all of ``view``; see RangeWriter."""
        with naming(self.path):
            if len(view) < _LARGE:
                write_fully(self._fd, [view], offset)
            else:
                self._output.write(view, offset)

    def finish(self) -> None:
        """Flush and close the file; see RangeWriter."""
        with naming(self.path):
            flush_to_disk(self._fd)
        self.close()

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def reserve_file(path: str, nbytes: int) -> None:
    """Make a file of a size, without blocks of the disk for it.

    Raises:
        StorageError: There is something of that name.
    """
    try:
        fd = os.open(path, _NEW, 0o666)
    except FileExistsError as error:
        raise taken_name(path) from error
    with naming(path):
        try:
            os.ftruncate(fd, nbytes)
        finally:
            os.close(fd)


def can_write_ranges(path: str) -> bool:
    """Whether a new file can be opened again and written in any order. The file is removed."""
    try:
        reserve_file(path, 2 * PAGE)
        fd = os.open(path, _OLD)
        try:
            for offset in (PAGE, 0):
                write_fully(fd, [bytearray(1)], offset)
        finally:
            os.close(fd)  # which is where some mounts tell what they could not do
    except OSError as error:
        if isinstance(error, StorageError) or error.errno not in _NO_RANGES:
            raise
        return False
    finally:
        with suppress(OSError):
            os.unlink(path)
    return True


def open_for_ranges(path: str) -> LocalRangeWriter:
    """Open a file that exists.

    Raises:
        CheckpointNotFoundError: There is none.
        StorageError: It is not a regular file.
    """
    try:
        fd = os.open(path, _OLD)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{path}: there is no such file.", path=path) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StorageError(f"{path}: is not a regular file.", path=path)
    os.set_blocking(fd, True)
    return LocalRangeWriter(path, fd)


def link_file(old: str, new: str) -> bool:
    """Give a file a second name; False if the file system cannot."""
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True
