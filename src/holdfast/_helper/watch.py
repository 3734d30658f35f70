"""Owns the helper's view of a write under way: how far it is, and whether it must stop."""

from holdfast._helper.slate import Slot
from holdfast._io.progress import ProgressTracker

__all__ = ["WriteCancelledError", "tracker_of"]


class WriteCancelledError(Exception):
    """The trainer has cancelled this write."""


def tracker_of(slot: Slot) -> ProgressTracker:
    """A tracker that notes progress in shared memory, and raises once the trainer has cancelled."""

    def advanced(nbytes: int) -> None:
        if slot.cancelled:
            raise WriteCancelledError("the write was cancelled")
        slot.note(nbytes)

    return ProgressTracker(advanced)
