"""Owns the rule by which the bytes of a write under way are counted."""

import threading
from collections.abc import Callable

__all__ = ["Tally"]


class Tally:
    """How much of a write is done, told from the values that were taken and the bytes that are in files.

    A value counts when the thread that took it comes for its next one: by then it is written. Bytes in
    files count at once, but never more of them than values were taken: the containers around values are
    bytes as well. A writer that tells of neither counts for nothing until it has ended.

    Args:
        tell: Called with ``done`` after each change; the calls come one at a time, from several threads.
    """

    def __init__(self, tell: Callable[[int], object] | None = None) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._under_way: dict[int, int] = {}
        self._finished = self._taken = self._written = 0

    @property
    def done(self) -> int:
        """Exact between values; never less than before."""
        return max(self._finished, min(self._taken, self._written))

    def take(self, nbytes: int) -> None:
        """This thread is about to write a value of so many bytes; the one it took before is written."""
        thread = threading.get_ident()
        with self._lock:
            self._finished += self._under_way.get(thread, 0)
            self._taken += nbytes
            self._under_way[thread] = nbytes
            self._changed()

    def wrote(self, nbytes: int) -> None:
        """So many more bytes are in files."""
        with self._lock:
            self._written += nbytes
            self._changed()

    def finish(self) -> None:
        """All that was taken is written."""
        with self._lock:
            self._finished = self._taken
            self._changed()

    def _changed(self) -> None:
        if self._tell is not None:
            self._tell(self.done)
