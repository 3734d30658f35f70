"""A save that the manager of rank 0 refuses: it fails on all ranks alike, before anything is written."""

from typing import Any

from holdfast.default_planner import DefaultSavePlanner
from holdfast.errors import CheckpointError


class RefusingPlanner(DefaultSavePlanner):
    """Raises an error where a save plans, which is the first step that all ranks take together.

    Args:
        error: Why the save is refused.
    """

    def __init__(self, error: CheckpointError) -> None:
        super().__init__()
        self._error = error

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        """Raise the error: the save is refused."""
        raise self._error
