"""Owns the arenas of one stager: which are idle, which are leased, and what to do when none is idle."""

import itertools
import os
import queue
import threading
import time
import weakref
from typing import Literal, TypeAlias

import torch

from holdfast._staging.arena import Arena
from holdfast.errors import UsageError

__all__ = ["Arenas", "Lease", "WhenBusy"]

WhenBusy: TypeAlias = Literal["wait", "raise", "another"]
"""What a staging does while an earlier copy is leased: wait for it, raise, or take more memory."""


class Lease:
    """The right to an arena, until it is released or dropped.

    After ``release`` the arena is lent again at once. If the lease is dropped instead, tensors that somebody
    still holds keep their memory, and the arena is lent again when the last of them is gone.
    """

    def __init__(self, arenas: "Arenas", arena: Arena, number: int) -> None:
        self.arena = arena
        self._arenas = arenas
        self._number = number
        self._give_back: weakref.finalize[..., object] | None = None

    def base(self, nbytes: int) -> torch.Tensor:
        """At least so many bytes of memory, as a tensor. Called once."""
        self.arena.grow(nbytes)
        base, hold = self.arena.lend()
        self._give_back = weakref.finalize(hold, self._arenas.give_back, self.arena)
        self._give_back.atexit = False
        return base

    def release(self) -> None:
        """Nobody reads the memory any more. Twice is fine."""
        if self._give_back is not None:
            self._give_back()
        elif self._arenas.is_leased(self._number):
            self._arenas.give_back(self.arena)
        self._arenas.end_lease(self._number)

    def __del__(self) -> None:
        if self._give_back is None:
            self.release()
        self._arenas.end_lease(self._number)


class Arenas:
    """Lends arenas, one at a time as a rule, and keeps one idle one at most.

    Any thread may use it. Arenas and leases come back from wherever the last tensor in them is dropped, which
    may be inside of the garbage collector, in a thread that holds any lock: so the way back takes none.
    """

    def __init__(self, *, shared: bool, pinned: bool, threads: int) -> None:
        self._shared = shared
        self._pinned = pinned
        self._threads = threads
        self._lock = threading.Lock()
        # SimpleQueue.put may be interrupted by another put of the same thread. None says: look again.
        self._idle: queue.SimpleQueue[Arena | None] = queue.SimpleQueue()
        self._leased: set[int] = set()
        self._numbers = itertools.count()
        self._closed = False
        self._pid = os.getpid()

    def take(self, *, when_busy: WhenBusy, timeout: float | None) -> Lease:
        """A lease of memory that nobody looks at. It waits for leases only, never for tensors that are held.

        Raises:
            UsageError: There is a lease and ``when_busy`` is "raise", or this is closed.
            TimeoutError: It was not ended in ``timeout`` seconds.
        """
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

    def _try_to_take(self, *, always: bool) -> Lease | None:
        with self._lock:
            self._forget_after_fork()
            if self._closed:
                raise UsageError("this stager is closed; make another one")
            arena = self._largest_idle()
            if arena is None:
                if self._leased and not always:
                    return None
                arena = Arena(shared=self._shared, pinned=self._pinned, threads=self._threads)
            number = next(self._numbers)
            self._leased.add(number)
            return Lease(self, arena, number)

    def _wait(self, deadline: float | None, timeout: float | None) -> None:
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            arena = self._idle.get(timeout=remaining)
        except queue.Empty:
            raise TimeoutError(
                f"an earlier staged copy was not released in {timeout} seconds; nothing was staged"
            ) from None
        if arena is not None or self._closed:
            self._idle.put(arena)

    def _largest_idle(self) -> Arena | None:
        """Takes all that are idle, and lets go of the others."""
        idle: list[Arena] = []
        while True:
            try:
                arena = self._idle.get_nowait()
            except queue.Empty:
                break
            if arena is not None:
                idle.append(arena)
        idle.sort(key=lambda arena: arena.nbytes)
        for surplus in idle[:-1]:
            surplus.close()
        return idle[-1] if idle else None

    def give_back(self, arena: Arena) -> None:
        """Nobody looks at the arena any more. Takes no lock."""
        if self._closed:
            arena.close()
        elif arena.owner_pid == self._pid:
            self._idle.put(arena)

    def is_leased(self, number: int) -> bool:
        """Whether a lease has not ended yet."""
        return number in self._leased

    def end_lease(self, number: int) -> None:
        """A lease has ended, and one who waits may look again. Takes no lock; twice is fine."""
        if number in self._leased:
            self._leased.discard(number)
            self._idle.put(None)

    def close(self) -> None:
        """Let go of all idle memory now and of the rest when it is given back. Twice is fine."""
        with self._lock:
            self._closed = True
            last = self._largest_idle()
        if last is not None:
            last.close()
        self._idle.put(None)

    def _forget_after_fork(self) -> None:
        # What a forked child inherits is the parent's: staging into it would overwrite the parent's copy.
        if self._pid != os.getpid():
            self._idle = queue.SimpleQueue()
            self._leased.clear()
            self._pid = os.getpid()
