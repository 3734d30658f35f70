"""Owns the helper's view of a write under way: counts what is asked for, and stops it between items."""

import threading

from holdfast._helper.slate import Slot

__all__ = ["Watch", "WriteCancelledError", "written_so_far"]


class WriteCancelledError(Exception):
    """The trainer does not want this write any more."""


class Watch:
    """Notes on the slate how far a write is.

    An item counts as done when the thread that asked for it asks for the next one.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._lock = threading.Lock()
        self._under_way: dict[int, int] = {}
        self._done = self._asked = 0

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
            self._slot.note(done=self._done, asked=self._asked)

    def finish(self) -> None:
        """All is written; raises WriteCancelledError if it shall not have been."""
        self.check()
        self._slot.note(done=self._asked, asked=self._asked)


def written_so_far(process: int | str) -> int:
    """How many bytes a process of this user has given to the system to write; 0 where that is not known."""
    try:
        with open(f"/proc/{process}/io", "rb") as file:
            return next((int(line[7:]) for line in file if line.startswith(b"wchar:")), 0)
    except (OSError, ValueError):
        return 0
