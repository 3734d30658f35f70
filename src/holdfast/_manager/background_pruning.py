"""Prunes in a thread, so that no save waits for a deletion."""

import atexit
import logging
import os
import threading
import weakref

from holdfast._steps.pruning import Pruning

logger = logging.getLogger(__name__)

_AT_EXIT_SECONDS = 5.0
_open: "weakref.WeakSet[BackgroundPruning]" = weakref.WeakSet()


class BackgroundPruning:
    """Runs a pruning in one thread, one at a time. Requests that come meanwhile are one request.

    A process that ends stops it between two steps, or in the middle of one: that is finished the next time.

    Args:
        pruning: What to run.
    """

    def __init__(self, pruning: Pruning) -> None:
        self.pruning = pruning
        self._owner = os.getpid()
        self._turn = threading.Lock()
        self._state = threading.Condition()
        self._is_wanted = False
        self._is_over = False
        self._thread: threading.Thread | None = None
        _open.add(self)

    def request(self) -> None:
        """Prune soon. Returns at once."""
        with self._state:
            self._is_wanted = not self._is_over
            if self._thread is None and self._is_wanted:
                self._thread = threading.Thread(target=self._work, name="holdfast-prune", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._state:
                if not self._is_wanted or self._is_over:
                    self._thread = None
                    self._state.notify_all()
                    return
                self._is_wanted = False
            try:
                self.run()
            except Exception as error:  # noqa: BLE001 - the next save asks again
                logger.warning("%s: could not be pruned now: %s", self.pruning.root.store.url, error)

    def run(self) -> list[int]:
        """Prune now, in this thread; the steps that were deleted."""
        with self._turn:
            return self.pruning.run(lambda: self._is_over)

    def leave_alone(self, folder: str) -> None:
        """Delete nothing in a folder until ``release``. Waits if that is what is being deleted right now."""
        self.pruning.in_use.add(folder)
        if self.pruning.current == folder:
            with self._turn:
                pass

    def release(self, folder: str) -> None:
        """The save into a folder is over."""
        self.pruning.in_use.discard(folder)

    def wait(self, timeout: float | None = None) -> bool:
        """Return when nothing is being deleted; False if that takes longer than ``timeout`` seconds."""
        if os.getpid() != self._owner:
            return True  # a forked child does not have the thread
        with self._state:
            return self._state.wait_for(lambda: self._thread is None, timeout)

    def close(self, timeout: float | None = None) -> None:
        """Finish what was asked for, or, after ``timeout`` seconds, the step that is being deleted."""
        if not self.wait(timeout):
            self._is_over = True
            self.wait(timeout)
        self._is_over = True


@atexit.register
def _close_all() -> None:
    for pruning in list(_open):
        pruning.close(_AT_EXIT_SECONDS)
