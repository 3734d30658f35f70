"""Watches this process while it saves or loads, and limits what it may do."""

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from typing_extensions import Self


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``nbytes``.

    Python ignores SIGXFSZ, so that a write beyond the limit fails with EFBIG.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def living_threads() -> tuple[list[str], int]:
    """The threads that Python knows, without this one, and how many the system knows of this process."""
    # torch starts threads of its own with the first large operation, and keeps them.
    torch.ones(1 << 20).add_(1)
    # torch starts a pool of threads in the first operation that uses one, and keeps it: not to be counted.
    torch.repeat_interleave(torch.arange(2), torch.ones(2, dtype=torch.int64))
    mine = threading.current_thread()
    others = sorted(thread.name for thread in threading.enumerate() if thread is not mine)
    return others, len(os.listdir("/proc/self/task"))


def assert_no_more_threads_than(before: tuple[list[str], int]) -> None:
    """Compare with what ``living_threads`` returned earlier."""
    python, system = living_threads()
    assert python == before[0]
    # A thread that has ended for Python takes the system a moment more to put away.
    deadline = time.monotonic() + 5
    while system > before[1] and time.monotonic() < deadline:
        os.sched_yield()
        system = living_threads()[1]
    assert system <= before[1], "a thread that Python does not know goes on"


class PeakMemory:
    """How far the resident memory of this process rose in a with-block above where it was, in bytes."""

    def __enter__(self) -> Self:
        # Without this the peak of an earlier test would hide that of this one.
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _peak()
        self.nbytes = 0
        return self

    def __exit__(self, *_: object) -> None:
        self.nbytes = _peak() - self._before


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10
