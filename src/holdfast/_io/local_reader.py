"""Owns the reading of one local file: what the page cache has, and what it has not."""

import contextlib
import errno
import os
import sys
from collections.abc import Sequence

from typing_extensions import Buffer

from holdfast._io.blocks import BlockChecker, BlockSums
from holdfast._io.cold_reads import ColdReads
from holdfast._io.file_access import FileReader
from holdfast._io.local_buffers import BUFFER_NBYTES, borrow, give_back
from holdfast._io.local_calls import O_DIRECT, PAGE, naming
from holdfast._io.progress import BUFFERED
from holdfast._io.streams import byte_view, copy_bytes

SPAN = 32 << 20
"""Bytes for which it is decided at once whether they are in the page cache; a good share for a thread."""

# One read: past the page cache 1 MiB is 10% slower, 8 MiB no faster. From memory 1 MiB is as fast in one
# thread; but the more calls, the more often threads wait for each other's interpreter lock between them.
_WINDOW = 4 << 20
# One read of cold bytes through the page cache: while it is copied, the kernel reads ahead. Reads of 4 MiB
# wait for the disk each time, and took 1.4 times as long; 128 KiB are too many calls.
_STEP_AHEAD = 512 << 10
_DIRECT_FROM = 1 << 20  # smaller reads gain more from the kernel's read-ahead than they lose
_NOWAIT = os.RWF_NOWAIT if sys.platform == "linux" else 0

assert _WINDOW <= BUFFER_NBYTES


class LocalReader(FileReader):
    """Reads one regular file of a local file system.

    Small reads, and large ones of bytes that the page cache has, are copied from there straight into
    the destination. Large reads of other bytes, cold ones, go through the cache, which keeps them for the
    next reader, or past it, which takes a third less CPU. Whether the page cache has them is seen by
    reading three bytes of the span, the first, the middle and the last, without waiting for the disk.

    One descriptor is open per file; one more per thread while that thread reads past the page cache.

    Args:
        path: The file, for messages.
        fd: It, open for reading. The reader owns the descriptor.
        cold: Decides which way cold reads go.
    """

    def __init__(self, path: str, fd: int, *, cold: ColdReads) -> None:
        self.path = path
        self._fd = fd
        self._cold = cold
        with naming(path):
            found = os.fstat(fd)
        self.nbytes, self._device = found.st_size, found.st_dev
        # Whether there is a way past the page cache, and whether it can be seen what is in the cache.
        self._direct = bool(O_DIRECT) and bool(_NOWAIT)

    def read_into(self, offset: int, buffer: Buffer) -> None:
        """Fill ``buffer`` from ``offset`` on; see FileReader."""
        view = byte_view(buffer)
        self._check_range(offset, len(view))
        self._fill(offset, view, None)

    def close(self) -> None:
        """Close the file. A read in another thread that is not over yet fails or completes."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            _close(fd)

    def read_whole_blocks(self, offset: int, view: memoryview, crcs: Sequence[int], block_size: int) -> None:
        self._check_range(offset, len(view))
        checker = BlockChecker(crcs, block_size, path=self.path, offset=offset)
        self._fill(offset, view, checker)
        checker.finish()

    def _fill(self, offset: int, view: memoryview, sums: BlockSums | None) -> None:
        with naming(self.path):
            for at in range(0, len(view), SPAN):
                span = view[at : at + SPAN]
                is_large = self._direct and len(span) >= _DIRECT_FROM
                if is_large and not self._is_cached(offset + at, len(span)):
                    self._read_cold(offset + at, span, sums)
                else:
                    self._read_plain(self._fd, offset + at, span, sums, _WINDOW)

    def _read_plain(self, fd: int, offset: int, view: memoryview, sums: BlockSums | None, most: int) -> None:
        for at in range(0, len(view), most):
            piece = view[at : at + most]
            got = os.preadv(fd, [piece], offset + at)
            while got < len(piece):
                more = os.preadv(fd, [piece[got:]], offset + at + got)
                if more == 0:
                    self.nbytes = os.fstat(fd).st_size
                    self._check_range(offset, len(view))
                    raise OSError(errno.EIO, "The file gave no bytes before its end")
                got += more
            if sums is not None:
                sums.update(piece)

    def _read_cold(self, offset: int, view: memoryview, sums: BlockSums | None) -> None:
        through_cache = self._cold.go_through_cache(self._device)
        try:
            # A new description of the very same file. O_DIRECT must not reach the other threads' reads. And
            # the kernel reads ahead of each description, which fails if threads jump to and fro in one.
            flags = os.O_RDONLY | os.O_CLOEXEC | (0 if through_cache else O_DIRECT)
            fd = os.open(f"/proc/self/fd/{self._fd}", flags)
        except OSError:
            self._direct = False
            if not through_cache:
                self._note(BUFFERED)
            self._read_plain(self._fd, offset, view, sums, _STEP_AHEAD)
            return
        try:
            if through_cache:
                with self._cold.observed(self._device, len(view)):
                    self._read_plain(fd, offset, view, sums, _STEP_AHEAD)
            else:
                done = _read_past_cache(fd, offset, view, sums)
                self._read_plain(self._fd, offset + done, view[done:], sums, _STEP_AHEAD)
        finally:
            _close(fd)

    def is_hot(self) -> bool:
        """Whether the file seems to be in the page cache; False where that cannot be told."""
        seems_so = self.nbytes == 0 or (self._direct and self._is_cached(0, self.nbytes))
        return seems_so and self._direct

    def _is_cached(self, offset: int, nbytes: int) -> bool:
        """Whether the span seems to be in the page cache. A wrong guess costs time only."""
        byte = bytearray(1)
        try:
            for at in (offset, offset + nbytes // 2, offset + nbytes - 1):
                os.preadv(self._fd, [byte], at, _NOWAIT)
        except BlockingIOError:
            return False
        except OSError:
            # Network and memory file systems cannot tell; their cache is the better way for all reads.
            self._direct = False
        return True


def _close(fd: int) -> None:
    # What was read is there, and checked. An error of a read that comes before this one must not be hidden.
    with contextlib.suppress(OSError):
        os.close(fd)


def _read_past_cache(fd: int, offset: int, view: memoryview, sums: BlockSums | None) -> int:
    """Read from the front of ``view`` on past the page cache; returns how far that went."""
    buffer = borrow()
    try:
        with memoryview(buffer) as window:
            return _read_windows(fd, window, offset, view, sums)
    finally:
        give_back(buffer)


def _read_windows(fd: int, window: memoryview, offset: int, view: memoryview, sums: BlockSums | None) -> int:
    done = 0
    while done < len(view):
        skip = (offset + done) % PAGE
        want = min(_WINDOW, -(-(skip + len(view) - done) // PAGE) * PAGE)
        try:
            got = os.preadv(fd, [window[:want]], offset + done - skip)
        except OSError as error:
            if error.errno == errno.EINVAL:
                break
            raise
        useful = min(got - skip, len(view) - done)
        if useful > 0:
            with window[skip : skip + useful] as piece:
                if sums is not None:
                    sums.update(piece)
                copy_bytes(view[done : done + useful], piece)
            done += useful
        if got < want:
            break
    return done
