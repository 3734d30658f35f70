"""Owns how buffers of a local file reach the disk: through the page cache, written back early, or past it."""

import dataclasses
import errno
import math
import os
import statistics
import time
from collections import deque

from holdfast._io.local_calls import (
    O_DIRECT,
    await_write_back,
    drop_pages,
    set_direct,
    start_write_back,
    write_fully,
)
from holdfast._io.page_cache import PageCache, room_for

_STRETCH = 64 << 20
"""Bytes after which the choice is made again. A throttled volume takes up to a quarter of that at once."""

_DIRTY_BUFFERS = 4
"""Buffers of a file that may be on their way from the page cache to the disk."""


@dataclasses.dataclass
class DiskPace:
    """What this process has seen of a disk.

    Attributes:
        copying: Seconds to copy a byte into the page cache. Of the quickest 64 MiB so far: where a virtual
            machine touched memory for the first time, it took twenty times as long.
        is_slow: Whether the disk takes at least twice as long for a byte; None until that was measured.
        was_fast: Whether the last 64 MiB, of a disk that is slow, said otherwise: a volume that is throttled
            takes the first bytes at once, so one such measurement is not believed.
    """

    copying: float = math.inf
    is_slow: bool | None = None
    was_fast: bool = False

    def note(self, is_slow: bool) -> None:
        """Take what was seen of another 64 MiB."""
        doubtful = self.is_slow and not is_slow and not self.was_fast
        self.was_fast = not is_slow
        if not doubtful:
            self.is_slow = is_slow


_paces: dict[int, DiskPace] = {}  # by the number of the device


class BufferOutput:
    """Writes the buffers of one file.

    Past the page cache a buffer takes the disk's time and hardly any CPU. Through it, the buffer is copied
    first, and is in memory for whoever reads the file next. That costs no time where the disk needs at least
    twice as long as the copy: one buffer is copied while those before it are written. Write-back starts with
    each buffer and is waited for a few buffers later, so that dirty memory stays bounded and the flush at the
    end has little to do.

    ``auto`` goes through the page cache until it knows the disk, then by what it measures, 64 MiB after
    64 MiB; and only while memory has room.

    Args:
        fd: The file, open for writing. It stays the caller's.
        page_cache: The policy.
        nbytes: About how large the file will be.
        save_nbytes: About how much this process will write, in all files.

    Attributes:
        is_refused: Whether the file system has refused to be written past the page cache.
    """

    def __init__(self, fd: int, page_cache: PageCache, nbytes: int, save_nbytes: int) -> None:
        self._fd = fd
        self._policy = page_cache
        self._left = nbytes
        self._has_room = page_cache == "keep" or (
            page_cache == "auto" and room_for(save_nbytes * _ranks_of_host())
        )
        self._pace = _paces.setdefault(os.fstat(fd).st_dev, DiskPace())
        self._can_direct = bool(O_DIRECT) and page_cache != "keep"
        self._is_direct = False
        self.is_refused = False
        self._drops = False  # what was written through the page cache is to leave it
        self._dirty: deque[tuple[int, int]] = deque()
        self._begin_stretch()
        self._choose_way()

    def write(self, buffer: memoryview, offset: int) -> None:
        """Write all of ``buffer`` at ``offset``. Past the page cache both must be multiples of a page.

        Raises:
            OSError: The disk failed, for this buffer or for one before it.
        """
        if self._is_direct:
            self._write_past(buffer, offset)
        else:
            self._write_through(buffer, offset)
        self._left = max(0, self._left - len(buffer))
        self._nbytes += len(buffer)
        if self._policy == "auto" and self._nbytes >= _STRETCH:
            self._judge_disk()
            # Once there was no room, there will be none for this file: other files may need what is free now.
            self._has_room = self._has_room and room_for(self._left * _ranks_of_host())
            self._begin_stretch()
            self._choose_way()

    def end_buffers(self) -> None:
        """Let the file take bytes that are no whole page: its last ones go through the page cache."""
        self._set_direct(on=False)

    def release_pages(self) -> None:
        """Let go of the file's pages if they are not to stay in memory. The file must have been flushed."""
        if self._drops:
            drop_pages(self._fd, 0, 0)

    def _write_past(self, buffer: memoryview, offset: int) -> None:
        began = time.perf_counter()
        try:
            write_fully(self._fd, [buffer], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Some file systems accept O_DIRECT and then refuse the write. Through the page cache it works; or
            # it shows what was really wrong.
            self._can_direct = False
            self.is_refused = True
            self._choose_way()
            write_fully(self._fd, [buffer], offset)
        self._disk += time.perf_counter() - began

    def _write_through(self, buffer: memoryview, offset: int) -> None:
        began = time.perf_counter()
        write_fully(self._fd, [buffer], offset)
        copied, worked = time.perf_counter(), time.thread_time()
        start_write_back(self._fd, offset, len(buffer))
        self._dirty.append((offset, len(buffer)))
        if len(self._dirty) > _DIRTY_BUFFERS:
            oldest = self._dirty.popleft()
            await_write_back(self._fd, *oldest)
            if self._drops:
                drop_pages(self._fd, *oldest)
        self._copies.append((copied - began) / len(buffer))
        # Without the work of handing pages to the disk, which takes as long for a fast one.
        self._disk += time.perf_counter() - copied - (time.thread_time() - worked)

    def _begin_stretch(self) -> None:
        self._nbytes = 0
        self._disk = 0.0
        self._copies: list[float] = []

    def _judge_disk(self) -> None:
        disk = self._disk / self._nbytes
        if self._copies:
            # While a buffer was copied the disk wrote others: only what is waited for besides is seen of its
            # time. If that is much, copying is not what holds the save up.
            self._pace.note(disk > statistics.mean(self._copies) / 2)
            self._pace.copying = min(self._pace.copying, statistics.median(self._copies))
        else:
            self._pace.note(disk > 2 * self._pace.copying)

    def _choose_way(self) -> None:
        is_worthwhile = self._policy == "keep" or self._pace.is_slow is not False
        self._set_direct(on=not (self._has_room and is_worthwhile))
        self._drops = not self._has_room and not self._is_direct

    def _set_direct(self, *, on: bool) -> None:
        on = on and self._can_direct
        if on != self._is_direct:
            self._is_direct = set_direct(self._fd, on) and on
            self._can_direct = self._can_direct and self._is_direct == on
            self.is_refused = self.is_refused or self._is_direct != on


def _ranks_of_host() -> int:
    """How many processes of this host save at the same time, as whoever started them has said."""
    number = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return int(number) if number.isdecimal() else 1
