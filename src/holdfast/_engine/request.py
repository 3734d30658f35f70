"""One save in the background, as others see it: may it go on, how far is it, how did it end."""

import concurrent.futures
import os
import threading
import time
import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from holdfast._io.oversight import Oversight
from holdfast._io.tally import Tally
from holdfast.errors import CheckpointError, CheckpointException

__all__ = ["Delegate", "Progress", "Request", "Same", "SaveCancelledError", "claims_of", "is_cancellation"]


class SaveCancelledError(CheckpointError):
    """A save was given up because somebody asked for it. It stays inside: futures are cancelled instead."""


def is_cancellation(error: BaseException) -> bool:
    """Whether a save ended by being cancelled, here or on another rank."""
    causes = [error]
    if isinstance(error, CheckpointException):
        causes += [cause for cause, _ in error.failures.values()]
    return any(isinstance(cause, SaveCancelledError) for cause in causes)


class Same:
    """An object as a key: equal to nothing but itself, whatever its own ideas of equality are."""

    def __init__(self, it: object) -> None:
        self._it = it  # held, so that no other object gets its id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other._it is self._it

    def __hash__(self) -> int:
        return id(self._it)


def claims_of(
    checkpoint_id: str | os.PathLike[str] | None, writer: Any, planner: Any
) -> tuple[str, frozenset[Hashable]]:
    """The place of a save in words, and what it has to itself: place, writer and planner keep state."""
    place: Any = checkpoint_id or getattr(writer, "checkpoint_id", None) or getattr(writer, "path", None)
    keys: set[Hashable] = {Same(tool) for tool in (writer, planner) if tool is not None}
    if isinstance(place, str | os.PathLike):
        place = os.fspath(place)
        keys.add(("place", place if "://" in str(place) else os.path.realpath(place)))
    return (f"a {type(writer).__name__}" if place is None else str(place)), frozenset(keys)


class Progress(NamedTuple):
    """How far this rank's part of a save is.

    Attributes:
        nbytes_done: What has been written.
        nbytes_total: What is to be written; 0 until that is planned.
        rate: Bytes a second since writing began; 0 until it has.
    """

    nbytes_done: int
    nbytes_total: int
    rate: float


@runtime_checkable
class Delegate(Protocol):
    """Who writes in another process: can be asked how far that is, and told what is wanted."""

    def progress(self) -> tuple[int, int]:
        """Bytes written, and bytes in all."""

    def cancel(self) -> None:
        """Stop."""


class Request(Oversight):
    """The shared state of one save in the background. Any thread may use it.

    A save can be given up until its last word: on the coordinator that is the commit, on every other rank
    telling the coordinator that its part is written. ``cancel`` and ``close`` race for it, and one wins.

    Attributes:
        place: Where to, in words.
        keys: What it has to itself until it ends; two requests that share one run one after the other.
        scope: Who saves together: the same object for all requests of a group.
        number: Its number in that scope, the same on every rank.
        group: The process group, held because its channel would end with it.
        ended: Set when nothing of it runs any more and all that it held is free.
        error: Why it failed; None while it has not. Cancelling is no failure.
        looked_at: Whether somebody has been told of the failure.
        passed_over: Whether a call has left the failure to the future, which its caller still held.
        asked: Whether the caller has asked if it is done, and was told so.
        future: The future, as long as somebody holds it.
    """

    def __init__(self, place: str, keys: frozenset[Hashable], scope: Any, number: int, group: Any) -> None:
        self.place = place
        self.keys = keys
        self.scope = scope
        self.number = number
        self.group = group
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self.looked_at = False
        self.passed_over = False
        self.asked = False
        self.future: weakref.ref[Any] | None = None
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._is_closed = False
        self._total = 0
        self._tally = Tally()
        self._began: float | None = None
        self._stopped: float | None = None
        self._delegate: Delegate | None = None

    @property
    def is_unseen_failure(self) -> bool:
        """Whether it has failed and nobody knows."""
        return self.error is not None and not self.looked_at

    @property
    def may_still_be_looked_at(self) -> bool:
        """Whether the caller holds the future and has had no reason yet to look at it."""
        held = self.future is not None and self.future() is not None
        return held and not self.asked and not self.passed_over

    def wait(self) -> None:
        """Return when it has ended, and its future says so."""
        self.ended.wait()
        future = None if self.future is None else self.future()
        if future is not None:
            concurrent.futures.wait([future])  # which callbacks of the future do not hold up

    def cancel(self) -> bool:
        """Have it given up; False if it is too late for that. True is a promise: it will not be committed."""
        with self._lock:
            if self._is_closed:
                return False
            self._is_cancelled = True
            delegate = self._delegate
        if delegate is not None:
            delegate.cancel()
        return True

    def check(self) -> None:
        """Raise SaveCancelledError if it is to be given up."""
        if self._is_cancelled:
            raise SaveCancelledError(f"the save to {self.place} was cancelled")

    def close(self) -> None:
        """From here on it cannot be cancelled; raises SaveCancelledError if it is already."""
        with self._lock:
            self.check()
            self._is_closed = True

    def begin_writing(self, nbytes: int) -> None:
        """So much is to be written."""
        self._total, self._began, self._stopped = nbytes, time.monotonic(), None
        self._tally = Tally()

    def delegate(self, delegate: Delegate) -> None:
        """Somebody else writes, who is to be asked and told."""
        with self._lock:
            self._delegate = delegate
            is_cancelled = self._is_cancelled
        if is_cancelled:
            delegate.cancel()

    def take(self, nbytes: int) -> None:
        """A value of so many bytes is about to be written; raises SaveCancelledError if it shall not."""
        self.check()
        self._tally.take(nbytes)

    def wrote(self, nbytes: int) -> None:
        """So many more bytes are in files; raises SaveCancelledError if there shall be no more."""
        self.check()
        self._tally.wrote(nbytes)

    def end_writing(self) -> None:
        """All is written."""
        self._delegate = None
        self._stopped = time.monotonic()

    def progress(self) -> Progress:
        """How far it is."""
        began, stopped = self._began, self._stopped
        if began is None:
            return Progress(0, self._total, 0.0)
        delegate = self._delegate
        if stopped is not None:
            done = self._total
        elif delegate is not None:
            done = delegate.progress()[0]
        else:
            done = min(self._total, self._tally.done)
        seconds = (stopped or time.monotonic()) - began
        return Progress(done, self._total, done / seconds if seconds > 0 else 0.0)
