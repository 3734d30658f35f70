"""A save in the background: the same in a thread of its own, on an exchange that the trainer's opened."""

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from holdfast._engine.request import Request, is_cancellation
from holdfast._engine.roster import roster
from holdfast._engine.save import run_save
from holdfast._engine.save_future import SaveFuture
from holdfast._engine.watched_writer import WatchedWriter
from holdfast._ranks.exchange import Exchange
from holdfast.metadata import Metadata
from holdfast.planner import SavePlanner
from holdfast.storage import StorageWriter

__all__ = ["BackgroundSave"]

logger = logging.getLogger(__name__)

# More would starve it where all cores are busy: there 256 MiB took 0.3 to 0.4 s at 0, 0.5 to 0.8 s at 5
# and 2.2 to 3.8 s at 19, and the loop beside it was not measurably faster for that.
_NICENESS = 5


class BackgroundSave:
    """One save, from the moment when the state is staged or being staged.

    The thread is not a daemon: the interpreter waits for it when the program ends, however that comes about,
    before anything that it needs is taken down.

    Args:
        request: Its shared state, not yet on the roster.
        future: What the caller is given.
        exchange: Opened by the trainer's thread, left by this one.
        obtain: Returns the staged state and who writes it, once the copy is complete; it raises why it never
            will be. Called in the thread.
        planner: Plans.
        use_collectives: As for ``save``.
        release: Called in the thread when the staged state is not needed any more.
    """

    def __init__(
        self,
        request: Request,
        future: SaveFuture,
        exchange: Exchange,
        *,
        obtain: Callable[[], tuple[dict[str, Any], StorageWriter]],
        planner: SavePlanner,
        use_collectives: bool,
        release: Callable[[], None],
    ) -> None:
        self._request = request
        self._future: SaveFuture | None = future
        self._exchange: Exchange | None = exchange
        self._obtain: Callable[[], tuple[dict[str, Any], StorageWriter]] | None = obtain
        self._planner: SavePlanner | None = planner
        self._use_collectives = use_collectives
        self._release: Callable[[], None] | None = release

    def start(self) -> None:
        """Begin. Raises RuntimeError where the system has no thread to give; then nothing has begun."""
        thread = threading.Thread(target=self._run, name=f"holdfast-save-{self._request.number}")
        thread.daemon = False  # also where the thread that calls is one
        roster.add(self._request)
        try:
            thread.start()
        except BaseException:
            self._request.ended.set()
            assert self._future is not None
            self._future.give_up()
            raise

    def _run(self) -> None:
        _step_back()
        metadata: Metadata | None = None
        error: BaseException | None = None
        try:
            metadata = self._save()
        except BaseException as raised:  # noqa: BLE001 - whatever it is, the future tells it
            error = raised
            _forget_locals(raised)
        self._end(metadata, error)

    def _save(self) -> Metadata:
        assert self._exchange is not None
        assert self._obtain is not None
        assert self._planner is not None
        with self._exchange:
            state, writer = self._obtain()
            self._request.check()
            return run_save(
                state,
                self._planner,
                WatchedWriter(writer, self._request),
                self._exchange,
                use_collectives=self._use_collectives,
            )

    def _end(self, metadata: Metadata | None, error: BaseException | None) -> None:
        """Free everything, then tell: whoever is told may begin the next save at once."""
        request, future, release = self._request, self._future, self._release
        assert future is not None
        assert release is not None
        self._future = self._exchange = self._obtain = self._planner = self._release = None
        try:
            release()
        except Exception as failure:  # noqa: BLE001 - a stranger's stager may raise anything
            logger.warning("%s: the staged copy could not be released: %r", request.place, failure)
        cancelled = error is not None and is_cancellation(error)
        if error is not None and not cancelled:
            request.error = error
            logger.error("the save to %s in the background failed: %s", request.place, error)
        request.group = None
        request.ended.set()
        request.keys = frozenset()
        # In this order: a callback may begin the next save, which waits until this future is done.
        _finish(future, error, metadata, cancelled=cancelled)
        if not future.staged.done():
            _finish(future.staged, error, None, cancelled=cancelled)


def _finish(future: Any, error: BaseException | None, value: Any, *, cancelled: bool) -> None:
    if cancelled:
        future.give_up()
    elif error is not None:
        future.fail(error)
    else:
        future.complete(value)


def _step_back() -> None:
    """Let the trainer go first. Threads that this one starts inherit that; the trainer's own do not."""
    if sys.platform == "linux":
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        except OSError:
            pass  # a nicety: some sandboxes forbid it


def _forget_locals(error: BaseException | None) -> None:
    """Let go of the staged state, which the frames of a traceback hold for as long as the error lives."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
