"""Owns how far a transfer of bytes has come, and how it is stopped."""

import threading
from collections.abc import Callable

__all__ = ["STRIDE", "ProgressTracker"]

STRIDE = 8 << 20
"""The most bytes that are transferred between two reports."""


class ProgressTracker:
    """Counts the bytes of a save or a load. Any thread may report to it.

    Args:
        on_advance: Called after each report with the bytes so far, one call at a time. An exception from it
            stops the transfer: it leaves ``advance``, and whoever transfers cleans up and passes it on.

    Attributes:
        nbytes_done: The bytes reported so far.
    """

    def __init__(self, on_advance: Callable[[int], object] | None = None) -> None:
        self.nbytes_done = 0
        self._on_advance = on_advance
        self._lock = threading.Lock()

    def advance(self, nbytes: int) -> None:
        """Report that ``nbytes`` more bytes were transferred, ``STRIDE`` at most.

        Raises:
            Exception: The transfer must stop; whatever ``on_advance`` raised.
        """
        with self._lock:
            self.nbytes_done += nbytes
            if self._on_advance is not None:
                self._on_advance(self.nbytes_done)
