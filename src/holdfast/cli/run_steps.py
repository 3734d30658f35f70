"""From the root that a user names to the steps of its run."""

import os
from datetime import datetime, timezone

from holdfast._io.places import local_path
from holdfast._steps.run_root import RunRoot
from holdfast._steps.step_list import Step
from holdfast._steps.step_names import StepNames, guess_names
from holdfast.errors import CheckpointNotFoundError

__all__ = ["open_root", "state_of", "time_of"]


def open_root(path: str, form: str | None) -> RunRoot:
    """The root at a path.

    Args:
        path: The path or URL.
        form: How its folders are called; None: as most of them are.

    Raises:
        CheckpointNotFoundError: There is no such folder.
        UsageError: The form is none.
    """
    folder = local_path(path)
    if folder is not None and not os.path.isdir(folder):
        what = "is a file, not the folder of a run" if os.path.exists(folder) else "there is no such folder"
        raise CheckpointNotFoundError(f"{path}: {what}", path=path)
    root = RunRoot(path, StepNames() if form is None else StepNames(form))
    if form is None:
        root.names = guess_names(root.store.below().folders)
    return root


def state_of(step: Step) -> str:
    """What a step is, in a word."""
    if step.commit is None:
        return "incomplete"
    return "damaged" if step.is_damaged else "complete"


def time_of(step: Step) -> str | None:
    """When a step was committed, in ISO 8601; None if that is not known."""
    if step.time is None:
        return None
    return datetime.fromtimestamp(step.time, timezone.utc).isoformat(timespec="seconds")
