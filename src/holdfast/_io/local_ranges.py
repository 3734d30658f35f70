"""Owns local files that several processes write together: each process writes the ranges that it has."""

import errno
import os
import stat
import sys
from contextlib import suppress

from holdfast._io.file_access import RangeWriter
from holdfast._io.local_calls import PAGE, flush_to_disk, naming, write_fully
from holdfast._io.page_cache import PageCache
from holdfast._io.store import ByteStore, check_name, taken_name
from holdfast._io.write_back import BufferOutput
from holdfast.errors import CheckpointNotFoundError, StorageError

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_LARGE = 256 << 10
"""From this on a range is handed to the disk at once. Smaller ones would cost a call more each."""
_REOPENS = sys.platform == "linux"
NO_RANGES = {
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
    """Writes ranges of a local file: whole pages as ``BufferOutput`` does, the rest through the page cache.

    Only pages that one range has all of go past the page cache, so that no page is written both ways.

    Args:
        path: The file, for messages.
        fd: It, open for writing. The writer owns the descriptor.
        page_cache: What to leave in the page cache.
        save_nbytes: About how much this process will write, in all files.
    """

    def __init__(self, path: str, fd: int, page_cache: PageCache, save_nbytes: int) -> None:
        self.path = path
        self._fd = fd
        # Whether writes go past the page cache belongs to an open file, so the pages have one of their own.
        self._pages = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC) if _REOPENS else os.dup(fd)
        nbytes = min(os.fstat(fd).st_size, save_nbytes)
        policy = page_cache if _REOPENS else "keep"
        self._output = BufferOutput(self._pages, policy, nbytes, max(nbytes, save_nbytes))

    def write_at(self, offset: int, view: memoryview) -> None:
        """Write all of ``view``; see RangeWriter."""
        first, last = -offset % PAGE, len(view) - (offset + len(view)) % PAGE
        with naming(self.path):
            if last - first < _LARGE:
                write_fully(self._fd, [view], offset)
                return
            self._output.write(view[first:last], offset + first)
            for begin, end in ((0, first), (last, len(view))):
                write_fully(self._fd, [view[begin:end]], offset + begin)

    def finish(self) -> None:
        """Flush and close the file; see RangeWriter."""
        with naming(self.path):
            flush_to_disk(self._fd)
            self._output.release_pages()
        self.close()

    def close(self) -> None:
        """Close the file."""
        for fd in (self._fd, self._pages):
            if fd >= 0:
                os.close(fd)
        self._fd = self._pages = -1


class LocalRanges(ByteStore):
    """The part of a local store that has files which are written in ranges, and renamed and linked."""

    _page_cache: PageCache
    _expected: int

    def _path(self, name: str) -> str:
        """The path of a file of the folder."""
        raise NotImplementedError

    def takes_ranges(self, name: str) -> bool:
        """Try whether files can be written in any order; see ByteStore."""
        path = self._path(check_name(name))
        try:
            self.reserve(name, 2 * PAGE)
            fd = os.open(path, _OLD)
            try:
                for offset in (PAGE, 0):
                    write_fully(fd, [bytearray(1)], offset)
            finally:
                os.close(fd)  # which is where some mounts tell what they could not do
        except OSError as error:
            if isinstance(error, StorageError) or error.errno not in NO_RANGES:
                raise
            return False
        finally:
            with suppress(OSError):
                os.unlink(path)
        return True

    def reserve(self, name: str, nbytes: int) -> None:
        """Make a new file of a size, without blocks of the disk for it; see ByteStore."""
        fd = create_file(self._path(check_name(name)))
        with naming(self._path(name)):
            try:
                os.ftruncate(fd, nbytes)
            finally:
                os.close(fd)

    def open_ranges(self, name: str) -> LocalRangeWriter:
        """Open a file to write ranges of it; see ByteStore."""
        path = self._path(check_name(name))
        try:
            fd = os.open(path, _OLD)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"{path}: there is no such file.", path=path) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise StorageError(f"{path}: is not a regular file.", path=path)
        os.set_blocking(fd, True)
        return LocalRangeWriter(path, fd, self._page_cache, self._expected)

    def rename(self, old: str, new: str) -> None:
        """Give a file another name; see ByteStore."""
        os.rename(self._path(check_name(old)), self._path(check_name(new)))

    def link(self, old: str, new: str) -> bool:
        """Give a file a second name, if the file system has hard links; see ByteStore."""
        try:
            os.link(self._path(check_name(old)), self._path(check_name(new)), follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return False
        return True


def create_file(path: str) -> int:
    """Make a new file, and open it for writing. Raises StorageError if the name is taken."""
    try:
        return os.open(path, NEW_FILE, 0o666)
    except FileExistsError as error:
        raise taken_name(path) from error
