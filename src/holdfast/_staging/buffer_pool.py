"""The pool of staging buffers of one stager: which are free, which are leased."""

import itertools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import torch

from holdfast._staging.staging_buffer import StagingBuffer
from holdfast.errors import UsageError

WhenBusy: TypeAlias = Literal["wait", "raise", "another"]
"""What ``stage`` does while an earlier copy is leased: wait for it, raise, or take another buffer."""


class BufferLease:
    """The right to use a buffer, until ``release`` is called or the lease is dropped.

    After ``release`` the buffer is free at once. If the lease is dropped instead, tensors in the buffer keep
    their memory, and the buffer is free when the last of them is gone.
    """

    def __init__(self, pool: "BufferPool", buffer: StagingBuffer, number: int) -> None:
        self.buffer = buffer
        self._pool = pool
        self._end = _when_gone(self, pool.end_lease, number)
        self._give_back = _when_gone(self, pool.give_back, buffer)

    def base(self, nbytes: int) -> torch.Tensor:
        """The buffer as a tensor of at least ``nbytes`` bytes. Must be called once at most."""
        self.buffer.grow(nbytes)
        base, hold = self.buffer.lend()
        self._give_back.detach()
        self._give_back = _when_gone(hold, self._pool.give_back, self.buffer)
        return base

    def release(self) -> None:
        """Say that nobody reads the memory any more. May be called twice."""
        self._give_back()
        self._end()


def _when_gone(thing: Any, call: Callable[..., object], argument: Any) -> "weakref.finalize[..., Any]":
    """Call ``call(argument)`` once: when the result is called, or else when ``thing`` is gone."""
    made = weakref.finalize(thing, call, argument)
    made.atexit = False
    return made


class BufferPool:
    """Lends staging buffers, normally one at a time, and keeps at most one free buffer.

    Any thread may use it. Buffers and leases come back where the last tensor in them is dropped. That may be
    inside the garbage collector, in a thread that holds any lock, so giving back takes no lock.
    """

    def __init__(self, *, shared: bool, pinned: bool, threads: int) -> None:
        self._shared = shared
        self._pinned = pinned
        self._threads = threads
        self._lock = threading.Lock()
        # SimpleQueue.put may be interrupted by another put of the same thread. None means: look again.
        self._free: queue.SimpleQueue[StagingBuffer | None] = queue.SimpleQueue()
        self._leased: set[int] = set()
        self._numbers = itertools.count()
        self._closed = False
        self._pid = os.getpid()

    def take(self, *, when_busy: WhenBusy, timeout: float | None) -> BufferLease:
        """Lease a buffer that nobody uses. It may wait for leases to end, never for tensors to be dropped.

        Raises:
            UsageError: There is a lease and ``when_busy`` is "raise", the pool is closed, or ``when_busy`` is
                none of the three.
            TimeoutError: No lease ended within ``timeout`` seconds.
        """
        if when_busy not in get_args(WhenBusy):
            raise UsageError(f"when_busy is 'wait', 'raise' or 'another', not {when_busy!r}", found=when_busy)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            lease = self._try_to_take(always=when_busy == "another")
            if lease is not None:
                return lease
            if when_busy == "raise":
                raise UsageError(
                    "an earlier staged copy is still in use, and when_busy is 'raise': release it first"
                )
            self._wait(deadline, timeout)

    def _try_to_take(self, *, always: bool) -> BufferLease | None:
        with self._lock:
            self._forget_after_fork()
            if self._closed:
                raise UsageError("this stager is closed; make another one")
            buffer = self._largest_free()
            if buffer is None:
                if self._leased and not always:
                    return None
                buffer = StagingBuffer(shared=self._shared, pinned=self._pinned, threads=self._threads)
            number = next(self._numbers)
            self._leased.add(number)
            return BufferLease(self, buffer, number)

    def _wait(self, deadline: float | None, timeout: float | None) -> None:
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            buffer = self._free.get(timeout=remaining)
        except queue.Empty:
            raise TimeoutError(
                f"an earlier staged copy was not released in {timeout} seconds; nothing was staged"
            ) from None
        if buffer is not None or self._closed:
            self._free.put(buffer)

    def _largest_free(self) -> StagingBuffer | None:
        """Take all free buffers, close all but the largest, and return that one."""
        free: list[StagingBuffer] = []
        while True:
            try:
                buffer = self._free.get_nowait()
            except queue.Empty:
                break
            if buffer is not None:
                free.append(buffer)
        free.sort(key=lambda buffer: buffer.nbytes)
        for surplus in free[:-1]:
            surplus.close()
        return free[-1] if free else None

    def give_back(self, buffer: StagingBuffer) -> None:
        """Say that nobody uses a buffer any more. Takes no lock."""
        if self._closed:
            buffer.close()
        elif buffer.owner_pid == self._pid:
            self._free.put(buffer)

    def end_lease(self, number: int) -> None:
        """End a lease and wake one thread that waits for a buffer. Takes no lock."""
        self._leased.discard(number)
        self._free.put(None)

    def close(self) -> None:
        """Give up all free memory now, and the rest when it is given back. May be called twice."""
        with self._lock:
            self._closed = True
            last = self._largest_free()
        if last is not None:
            last.close()
        self._free.put(None)

    def _forget_after_fork(self) -> None:
        # The buffers that a forked child inherits are the parent's: it would overwrite the parent's copy.
        if self._pid != os.getpid():
            self._free = queue.SimpleQueue()
            self._leased.clear()
            self._pid = os.getpid()
