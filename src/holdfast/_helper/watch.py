"""Owns the helper's view of a write under way: how far it is, and whether it shall stop."""

from holdfast._helper.slate import Slot
from holdfast._io.oversight import Oversight
from holdfast._io.tally import Tally

__all__ = ["Watch", "WriteCancelledError"]


class WriteCancelledError(Exception):
    """The trainer does not want this write any more."""


class Watch(Oversight):
    """Notes on the slate how far a write is, and heeds what the trainer wants of it."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._tally = Tally(slot.note)

    def check(self) -> None:
        """Raise WriteCancelledError if the write shall stop."""
        if self._slot.cancelled:
            raise WriteCancelledError("the write was cancelled")

    def take(self, nbytes: int) -> None:
        """The next item is about to be written; raises WriteCancelledError if it shall not."""
        self.check()
        self._tally.take(nbytes)

    def wrote(self, nbytes: int) -> None:
        """So many bytes went into a file; raises WriteCancelledError if there shall be no more."""
        self.check()
        self._tally.wrote(nbytes)

    def finish(self) -> None:
        """All is written; raises WriteCancelledError if it shall not have been."""
        self.check()
        self._tally.finish()
