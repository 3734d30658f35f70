"""One save in the background, as others see it: may it go on, how far is it, how did it end."""

import concurrent.futures
import os
import threading
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from holdfast._engine.adapt import place_of
from holdfast._engine.save import SaveCancellation
from holdfast._io.places import local_path
from holdfast._io.progress import Progress, ProgressTracker
from holdfast._writer_process.process_writer import ProcessWriter
from holdfast.errors import CheckpointError, CheckpointException


class SaveCancelledError(CheckpointError):
    """A save was cancelled. Users do not see it: futures report themselves as cancelled instead."""


def is_cancellation(error: BaseException) -> bool:
    """Whether a save ended by being cancelled, here or on another rank."""
    causes = [error]
    if isinstance(error, CheckpointException):
        causes += [cause for cause, _ in error.failures.values()]
    return any(isinstance(cause, SaveCancelledError) for cause in causes)


class IdentityKey:
    """An object as a key that is equal only to itself, even if its class defines ``__eq__``."""

    def __init__(self, it: object) -> None:
        self._it = it  # held, so that no other object gets its id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and other._it is self._it

    def __hash__(self) -> int:
        return id(self._it)


def exclusive_keys(
    checkpoint_id: str | os.PathLike[str] | None, storage: Any, planner: Any
) -> tuple[str, frozenset[Hashable]]:
    """The place of a save or load in words, and what it must not share with a save that is under way.

    These are its place, its storage and its planner, because each of them keeps state.
    """
    place = checkpoint_id or place_of(storage)
    keys: set[Hashable] = {IdentityKey(plugin) for plugin in (storage, planner) if plugin is not None}
    if isinstance(place, str | os.PathLike):
        place = os.fspath(place)
        folder = local_path(place)
        keys.add(("place", place.rstrip("/") if folder is None else os.path.realpath(folder)))
    return (f"a {type(storage).__name__}" if place is None else str(place)), frozenset(keys)


@dataclass(eq=False)
class RunningSave(SaveCancellation):
    """The shared state of one save in the background. Any thread may use it.

    A save can be cancelled until it is closed. On the coordinator that is just before the commit; on every
    other rank it is when the rank has written its part. ``cancel`` and ``close`` race, and one wins.

    Attributes:
        place: Where it saves to, in words.
        keys: What it has for itself until it ends; two saves that share a key run one after the other.
        scope: The ranks that save together: the same object for all saves of a group.
        number: Its number in that scope, the same on every rank.
        group: The process group, held because its channel would end with it.
        rank: This rank's number among those that save.
        tracker: Told of the bytes that are written; raises SaveCancelledError once the save is cancelled.
        thread: The thread that runs it, once it does. A call from that thread must not wait for it.
        ended: Set when nothing of it runs any more and all that it held is free.
        error: Why it failed; None while it has not failed. Cancelling is no failure.
        looked_at: Whether somebody has been told of the failure.
        passed_over: Whether a call has left the failure to the future, which its caller still held.
        asked: Whether the caller has asked if it is done, and the answer was yes.
        future: The future, as long as somebody holds it.
    """

    place: str
    keys: frozenset[Hashable]
    scope: Any
    number: int
    group: Any
    rank: int
    thread: int | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    looked_at: bool = False
    passed_over: bool = False
    asked: bool = False
    future: "weakref.ref[Any] | None" = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_cancelled: bool = False
    _is_closed: bool = False
    _elsewhere: ProcessWriter | None = None

    def __post_init__(self) -> None:
        self.tracker = ProgressTracker(lambda _: self.check())

    @property
    def is_unseen_failure(self) -> bool:
        """Whether it has failed and nobody knows."""
        return self.error is not None and not self.looked_at

    @property
    def is_held(self) -> bool:
        """Whether somebody holds the future."""
        return self.future is not None and self.future() is not None

    @property
    def is_awaited(self) -> bool:
        """Whether a thread waits for the future, and so is about to be told of a failure."""
        future = None if self.future is None else self.future()
        return future is not None and future.is_awaited

    @property
    def may_still_be_looked_at(self) -> bool:
        """Whether the caller holds the future and has had no reason yet to look at it."""
        return self.is_held and not self.asked and not self.passed_over

    def wait(self) -> None:
        """Return when it has ended and its future is done."""
        self.ended.wait()
        future = None if self.future is None else self.future()
        if future is not None:
            concurrent.futures.wait([future])  # callbacks of the future do not delay this

    def cancel(self) -> bool:
        """Cancel it. True promises that it will not be committed; False means that it is too late."""
        with self._lock:
            if self._is_closed:
                return False
            self._is_cancelled = True
            elsewhere = self._elsewhere
        if elsewhere is not None:
            elsewhere.cancel()
        return True

    def check(self) -> None:
        """Raise SaveCancelledError if it was cancelled."""
        if self._is_cancelled:
            raise SaveCancelledError(f"the save to {self.place} was cancelled")

    def close(self) -> None:
        """Make it impossible to cancel; raises SaveCancelledError if it was cancelled before."""
        with self._lock:
            self.check()
            self._is_closed = True

    def writes_elsewhere(self, writer: ProcessWriter) -> None:
        """Another process will write: ask it for progress, and tell it when the save is cancelled."""
        with self._lock:
            self._elsewhere = writer
            is_cancelled = self._is_cancelled
        if is_cancelled:
            writer.cancel()

    def progress(self) -> Progress:
        """How far it is."""
        elsewhere = self._elsewhere
        return self.tracker.progress(None if elsewhere is None else elsewhere.nbytes_done)
