"""Owns how far a transfer of bytes has come, and how it is stopped."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

STRIDE = 8 << 20
"""The most bytes that are transferred between two reports."""

BUFFERED = "page cache instead of O_DIRECT"
"""The event of a file whose file system refused to be read or written past the page cache."""


class Progress(NamedTuple):
    """How far this rank's part of a save or load is.

    Attributes:
        nbytes_done: The bytes that have been written or read.
        nbytes_total: The bytes to write or read. Until that is planned: the bytes of the copy that a save in
            the background has taken, which may be more, because ranks share the work; otherwise 0.
        rate: Bytes a second since the transfer began; 0 until then.
    """

    nbytes_done: int
    nbytes_total: int
    rate: float


class ProgressTracker:
    """Counts the bytes of a save or a load. Any thread may use it.

    Args:
        on_advance: Called after each report with the bytes so far, one call at a time. An exception from it
            stops the transfer: it leaves ``advance``, and whoever transfers cleans up and passes it on.

    Attributes:
        nbytes_done: The bytes reported so far.
        is_watched: Whether anybody wants to know: if not, totals need not be computed.
        events: How often something happened that should not be needed, such as a retry, by its name.
    """

    def __init__(self, on_advance: Callable[[int], object] | None = None) -> None:
        self.nbytes_done = 0
        self.is_watched = on_advance is not None
        self.events: dict[str, int] = {}
        self._on_advance = on_advance
        self._lock = threading.Lock()
        self._total = 0
        self._began: float | None = None
        self._ended: float | None = None

    @classmethod
    def reporting_to(cls, observer: "Callable[[Progress], object] | None") -> "ProgressTracker | None":
        """A tracker that calls ``observer`` after each report; None if there is nobody to call."""
        if observer is None:
            return None
        tracker = cls(lambda _: observer(tracker.progress()))
        return tracker

    def expect(self, nbytes_total: int) -> None:
        """Say about how many bytes it will be, before that is planned."""
        self._total = nbytes_total

    def adopt(self, nbytes_done: int, events: Mapping[str, int]) -> None:
        """Take what another process has counted in place of this one."""
        self.nbytes_done = nbytes_done
        for event, count in events.items():
            self.note(event, count)

    def begin(self, nbytes_total: int) -> None:
        """Note that ``nbytes_total`` bytes are about to be transferred."""
        self._total, self._began = nbytes_total, time.monotonic()

    def advance(self, nbytes: int) -> None:
        """Report that ``nbytes`` more bytes were transferred, ``STRIDE`` at most.

        Raises:
            Exception: The transfer must stop; whatever ``on_advance`` raised.
        """
        with self._lock:
            self.nbytes_done += nbytes
            if self._on_advance is not None:
                self._on_advance(self.nbytes_done)

    def note(self, event: str, count: int = 1) -> None:
        """Count something that should not be needed, such as a retry, for the record of the save or load."""
        with self._lock:
            self.events[event] = self.events.get(event, 0) + count

    def end(self) -> None:
        """Note that all is transferred, and report it. Raises what ``on_advance`` raises."""
        self._ended = time.monotonic()
        self.advance(0)

    def progress(self, nbytes_done: int | None = None) -> Progress:
        """How far it is.

        Args:
            nbytes_done: The bytes so far, if another process counts them.
        """
        began, ended = self._began, self._ended
        if began is None:
            return Progress(0, self._total, 0.0)
        done = self.nbytes_done if nbytes_done is None else nbytes_done
        # Containers around values are bytes in files, too: until the end there may be more than planned.
        done = self._total if ended is not None else min(self._total, done)
        seconds = (ended or time.monotonic()) - began
        return Progress(done, self._total, done / seconds if seconds > 0 else 0.0)
