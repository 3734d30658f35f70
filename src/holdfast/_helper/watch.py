"""Owns the helper's view of a write under way: counts what is asked for and written, and stops it."""

import threading

from holdfast._helper.slate import Slot
from holdfast._io.oversight import Oversight

__all__ = ["Watch", "WriteCancelledError"]


class WriteCancelledError(Exception):
    """The trainer does not want this write any more."""


class Watch(Oversight):
    """Notes on the slate how far a write is, and heeds what the trainer wants of it.

    An item counts as done when the thread that asked for it asks for the next one.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._lock = threading.Lock()
        self._under_way: dict[int, int] = {}
        self._done = self._asked = self._written = 0

    def check(self) -> None:
        """Raise WriteCancelledError if the write shall stop."""
        if self._slot.cancelled:
            raise WriteCancelledError("the write was cancelled")

    def count(self, nbytes: int) -> None:
        """The next item is about to be written; raises WriteCancelledError if it shall not."""
        self.check()
        thread = threading.get_ident()
        with self._lock:
            self._done += self._under_way.get(thread, 0)
            self._asked += nbytes
            self._under_way[thread] = nbytes
            self._note()

    def wrote(self, nbytes: int) -> None:
        """So many bytes went into a file; raises WriteCancelledError if there shall be no more."""
        self.check()
        with self._lock:
            self._written += nbytes
            self._note()

    def finish(self) -> None:
        """All is written; raises WriteCancelledError if it shall not have been."""
        self.check()
        self._done = self._asked
        self._note()

    def _note(self) -> None:
        self._slot.note(done=self._done, asked=self._asked, written=self._written)
