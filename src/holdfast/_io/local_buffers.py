"""Owns the page-aligned memory through which files are read and written past the page cache."""

import contextlib
import mmap
import os
import sys
import threading

BUFFER_NBYTES = 8 << 20
"""One buffer. Rings of 4 x 8 MiB wrote as fast as 4 x 32 MiB, with a third less CPU: more of it stays in
cache."""

_IDLE_LIMIT = 12
# Filling fresh memory took 4.6 ms a buffer, reused memory 0.3 ms. So those of an upload stay, 96 MiB at most.
# With 4 of them, saves of 256 MiB to an object store took 0.1 to 1.0 s of system time per GiB; with 12,
# 0.1 to 0.2 s.

_HUGE_PAGES = mmap.MADV_HUGEPAGE if sys.platform == "linux" else 0
_UNTIL_NEEDED = mmap.MADV_FREE if sys.platform == "linux" else 0

_idle: list[mmap.mmap] = []
_lock = threading.Lock()


def borrow() -> mmap.mmap:
    """A page-aligned buffer of BUFFER_NBYTES with anything in it. Never waits: callers bound their number."""
    with _lock:
        if _idle:
            return _idle.pop()
    # Private: a shared mapping would still be written to by a forked child.
    buffer = mmap.mmap(-1, BUFFER_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _HUGE_PAGES:
        # The disk is told of every page. With 4 of 2 MiB instead of 2048 of 4 KiB, saves of 1 GiB took
        # 0.64 s instead of 0.82 s.
        with contextlib.suppress(OSError):  # a kernel that has none: nothing but speed depends on it
            buffer.madvise(_HUGE_PAGES)
    return buffer


def give_back(buffer: mmap.mmap) -> None:
    """Return a buffer of which no view is in use any more. The system takes its memory if it needs some."""
    if _UNTIL_NEEDED:
        with contextlib.suppress(OSError):  # a kernel that does not know it: then the memory stays
            buffer.madvise(_UNTIL_NEEDED)
    with _lock:
        if len(_idle) < _IDLE_LIMIT:
            _idle.append(buffer)
            return
    # The traceback of a failed write may still have a view of it: then the memory goes when that does.
    with contextlib.suppress(BufferError):
        buffer.close()


def _forget_after_fork() -> None:
    global _lock  # noqa: PLW0603 - another thread may have held it when the process was copied
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
