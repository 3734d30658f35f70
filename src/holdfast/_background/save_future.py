"""What the caller of a save in the background holds."""

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures._base import CANCELLED_AND_NOTIFIED
from typing import TypeVar

from holdfast._background.running_save import RunningSave
from holdfast._human_units import size_text
from holdfast._io.progress import Progress
from holdfast._transfer_record import TransferRecord
from holdfast.metadata import Metadata

T = TypeVar("T")


class _Watched(Future[T]):
    """A future that knows when somebody has been told of a failure.

    It stays pending, in the words of its base class, until there is an outcome: so it can be cancelled then.
    """

    def __init__(self, looked_at: Callable[[], None]) -> None:
        super().__init__()
        self._looked_at = looked_at
        self._waiting: list[None] = []

    def result(self, timeout: float | None = None) -> T:
        """As ``concurrent.futures.Future`` has it."""
        self.exception(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As ``concurrent.futures.Future`` has it."""
        self._waiting.append(None)
        try:
            error = super().exception(timeout)
            if error is not None:
                self._looked_at()
        finally:
            self._waiting.pop()
        return error

    @property
    def is_awaited(self) -> bool:
        """Whether a thread is in ``exception`` or ``result`` now."""
        return bool(self._waiting)

    def running(self) -> bool:
        """Whether there is no outcome yet."""
        return not Future.done(self)

    def give_up(self) -> None:
        """Finish as cancelled."""
        # The base class does this in two steps. A waiting thread could wake between, and see a future that
        # is cancelled and not yet done.
        with self._condition:
            self._state = CANCELLED_AND_NOTIFIED
            for waiter in self._waiters:
                waiter.add_cancelled(self)
            self._condition.notify_all()
        self._invoke_callbacks()  # type: ignore[attr-defined]


class StagedFuture(_Watched[None]):
    """Done when the copy is complete, so that the original may change. Raises if the copy failed.

    It cannot be cancelled by itself: cancel the save.
    """

    def cancel(self) -> bool:
        """False: only the save as a whole can be."""
        return False


class SaveFuture(_Watched[Metadata | None]):
    """The outcome of a save in the background: the metadata of the checkpoint, once that is durable.

    ``result`` and ``exception`` wait for it. A failure that nobody asks for is raised by a later call.

    Attributes:
        staged: A future for the copy alone: when it is done, the original may change.
        waited: For how many seconds the call waited for earlier saves.
        skipped: Whether nothing was saved because an earlier save was not done. The result is None then.
        record: What the save did, by phase and rank; None until it has succeeded.
    """

    def __init__(self, running: RunningSave, *, waited: float = 0.0, skipped: bool = False) -> None:
        def looked_at() -> None:
            running.looked_at = True

        super().__init__(looked_at)
        self.staged = StagedFuture(looked_at)
        self.waited = waited
        self.skipped = skipped
        self.record: TransferRecord | None = None
        self._running = running
        running.future = weakref.ref(self)

    def cancel(self) -> bool:
        """Cancel the save on all ranks, if it is not too late.

        Returns:
            True if it was not too late: before the commit on the coordinator, before the rank has written
            its part on the others. Then nothing is committed; ``done`` and ``cancelled`` become true when
            all that the save wrote is removed, and the futures of other ranks are cancelled too.
        """
        return not self.done() and self._running.cancel()

    def done(self) -> bool:
        """Whether there is an outcome."""
        is_done = super().done()
        if is_done:
            self._running.asked = True
        return is_done

    @property
    def looked_at(self) -> bool:
        """Whether somebody has been told of a failure."""
        return self._running.looked_at

    def progress(self) -> Progress:
        """Bytes written by this rank, bytes to write, and bytes a second. Never waits.

        The bytes to write are known from the start: first the size of the copy, then what is planned.
        """
        return self._running.progress()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self._running.place}: {self._state_in_words()}>"

    def _state_in_words(self) -> str:
        if self.skipped:
            return "skipped"
        # Not by done(): looking at the repr is not asking whether it is done.
        if not Future.done(self):
            done, total, _ = self._running.progress()
            return f"{size_text(done)} of {size_text(total)} written"
        if Future.cancelled(self):
            return "cancelled"
        error = self._exception
        return "saved" if error is None else f"failed with {type(error).__name__}"
