"""From the root that a user names to the steps of its run, and how a step is described."""

import os
from datetime import datetime, timezone

from holdfast._format.names import METADATA, metadata_rank
from holdfast._io.places import local_path
from holdfast._io.store import FileFacts
from holdfast._steps.root_files import PREFIX
from holdfast._steps.run_root import RunRoot
from holdfast._steps.step_list import Step, StepList
from holdfast._steps.step_names import StepNames, guess_names
from holdfast.errors import CheckpointNotFoundError, UsageError

__all__ = ["UNREADABLE", "check_is_run", "notes_of", "open_root", "state_of", "time_of", "time_text"]

UNREADABLE = "unreadable"
"""The state of a step whose folder this user may not look into."""


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


def check_is_run(root: RunRoot, found: StepList) -> None:
    """Raise if a folder without steps is something else than a run that has saved nothing yet.

    Raises:
        UsageError: It is a checkpoint.
        CheckpointNotFoundError: It has other things, or does not exist.
    """
    if found.steps:
        return
    below = root.store.below()
    if METADATA in below.files or any(metadata_rank(name) is not None for name in below.files):
        raise UsageError(
            f"{root.place} is a checkpoint, and not the folder of a run: name the folder that it is in",
            path=root.place,
        )
    there = sorted({*below.folders, *(name for name in below.files if not name.startswith(PREFIX))})
    if there or local_path(root.place) is None:
        has = (
            f"it has {', '.join(there[:3])}{', ...' if len(there) > 3 else ''}"
            if there
            else "nothing is there"
        )
        raise CheckpointNotFoundError(
            f"{root.place}: no folder here has the name of a step ({has}). Folders of steps have a number at "
            "the end of their names; for other names pass --name, as in --name 'run-{step}-final'",
            path=root.place,
        )


def state_of(step: Step) -> str:
    """The state of a step, in a word."""
    if step.commit is None:
        return "incomplete" if step.unseen is None else UNREADABLE
    return "damaged" if step.is_damaged else "complete"


def notes_of(step: Step) -> list[str]:
    """More facts of a step, in a few words each."""
    pinned = ["pinned"] if step.is_pinned else []
    return [*pinned, "from before the run went back"] if step.is_abandoned else pinned


def time_of(commit: FileFacts | None) -> str | None:
    """When a checkpoint was committed, in ISO 8601; None if that is not known."""
    if commit is None or commit.modified_ns is None:
        return None
    return datetime.fromtimestamp(commit.modified_ns // 10**9, timezone.utc).isoformat()


def time_text(time: str | None) -> str:
    """A time of ``time_of`` for people; empty if it is not known."""
    return (time or "").replace("T", " ").replace("+00:00", " UTC")
