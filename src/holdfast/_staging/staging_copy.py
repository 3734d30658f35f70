"""Copies memory to memory on the host, on a few threads, as fast as the machine can."""

import ctypes
import errno
import os
import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from holdfast._io import pool

_PIECE_NBYTES = 128 << 20
"""The most that one call copies. The C library bypasses the cache only in calls above a threshold of its own:
99 MiB on a machine where 2 GiB took 0.20 s in such calls, and 0.32 s in calls of 32 MiB."""

_ALONE_NBYTES = 1 << 20
"""The calling thread copies smaller spans: threads that make calls of microseconds compete for the GIL."""

_MOST_THREADS = 8

_MADV_POPULATE_WRITE = 23
# Python's mmap module has no name for it before 3.13, and its madvise holds the GIL meanwhile.

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

Span = tuple[int, int, int]
"""A source address, an offset in the destination, and a number of bytes."""


def default_threads() -> int:
    """The number of cores that this process may use, 8 at most: a few threads saturate the memory."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(_MOST_THREADS, cores)


def copy_spans(spans: Sequence[Span], destination: int, *, threads: int) -> None:
    """Copy each span to its offset from the address ``destination``. The addresses are not checked."""
    large = [span for span in spans if span[2] >= _ALONE_NBYTES]
    move = ctypes.memmove
    if len(large) < len(spans):
        for source, offset, nbytes in spans:
            if nbytes < _ALONE_NBYTES:
                move(destination + offset, source, nbytes)
    total = sum(nbytes for _, _, nbytes in large)
    step = min(_PIECE_NBYTES, max(_ALONE_NBYTES, -(-total // threads)))
    jobs = [
        partial(move, destination + offset + at, source + at, min(step, nbytes - at))
        for source, offset, nbytes in large
        for at in range(0, nbytes, step)
    ]
    pool.run(jobs, threads=threads)


class HostCopy:
    """Copies spans in a thread. It has the methods of a device's event, so that both are waited for alike.

    Args:
        spans: What to copy.
        sources: The tensors that the spans lie in; they live as long as the copy goes on.
        base: The buffer to copy to.
        threads: How many threads copy.
        event: The end of the copies from a device, which belong to the same state; None if there are none.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        sources: Sequence[torch.Tensor],
        base: torch.Tensor,
        threads: int,
        event: Any,
    ) -> None:
        self._error: BaseException | None = None
        self._event = event
        self._sources: Sequence[torch.Tensor] | None = sources
        self._thread = threading.Thread(
            target=self._copy, args=(spans, base, threads), name="holdfast-staging", daemon=True
        )
        self._thread.start()

    def _copy(self, spans: Sequence[Span], base: torch.Tensor, threads: int) -> None:
        try:
            copy_spans(spans, base.data_ptr(), threads=threads)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the copy raises it
            self._error = error
        self._sources = None  # they had to live until now

    def query(self) -> bool:
        """Whether everything has been copied."""
        if self._thread.is_alive() or self._error is not None:
            return False
        return self._event is None or bool(self._event.query())

    def synchronize(self) -> None:
        """Return when everything has been copied; raise if that failed."""
        self._thread.join()
        if self._event is not None:
            self._event.synchronize()
        if self._error is not None:
            raise self._error


def touch(address: int, nbytes: int, *, threads: int) -> None:
    """Take all pages of a new, zeroed mapping now, so that the first copy does not take them one by one.

    Raises:
        MemoryError: There is not enough memory.
    """
    step = max(2 << 20, -(-nbytes // threads) + 4095 & ~4095)
    jobs = [partial(_populate, address + at, min(step, nbytes - at)) for at in range(0, nbytes, step)]
    pool.run(jobs, threads=threads)


def _populate(address: int, nbytes: int) -> None:
    while _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) != 0:
        number = ctypes.get_errno()
        if number == errno.EINVAL:  # Linux before 5.14, and other systems
            ctypes.memset(address, 0, nbytes)
            return
        if number not in (errno.EINTR, errno.EAGAIN):
            raise MemoryError(f"the system has no {nbytes} bytes left: {os.strerror(number)}")


def differs(one: int, other: int, nbytes: int) -> bool:
    """Whether the ``nbytes`` bytes at two addresses differ."""
    return bool(_libc.memcmp(one, other, nbytes) != 0)
