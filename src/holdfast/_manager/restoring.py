"""Restores a run: the newest step that is complete and sound in what is asked for."""

import errno
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast._format.names import METADATA
from holdfast._human_units import some_of
from holdfast._ranks.group_exchange import open_exchange
from holdfast._steps.pruning import mark_damaged
from holdfast._steps.run_root import RunRoot
from holdfast._steps.step_list import Step, StepList
from holdfast._steps.step_metadata import METRICS, USER
from holdfast._steps.step_names import KNOWN_FORMS, guess_names
from holdfast.errors import (
    CheckpointException,
    CheckpointNotFoundError,
    IntegrityError,
    NewerFormatError,
    UnsafeMetadataError,
    WrongFolderError,
)
from holdfast.load_result import LoadResult
from holdfast.state_dict_loader import load

logger = logging.getLogger(__name__)

_MAY_LEAVE_OUT = ("allow_partial_load", "ignore_mismatched_sizes", "planner")


@dataclass(frozen=True)
class RestoredStep:
    """What ``CheckpointManager.restore`` has loaded.

    Attributes:
        step: The step.
        metrics: The metrics that it was saved with.
        metadata: The metadata that it was saved with.
        result: What the load did.
        skipped: Newer steps that are damaged or incomplete, each with the reason. A manager for reading only
            leaves out incomplete ones: others may be saving them.
    """

    step: int
    metrics: Mapping[str, Any]
    metadata: Mapping[str, Any]
    result: LoadResult
    skipped: Mapping[int, str]


def restore_newest(
    root: RunRoot,
    state: Any,
    number: int | None,
    group: Mapping[str, Any],
    options: dict[str, Any],
    *,
    read_only: bool,
) -> RestoredStep | None:
    """Load a step, or the newest sound one; called on every rank. See ``CheckpointManager.restore``."""
    tried: set[tuple[str, Any]] = set()
    first_error: CheckpointException | None = None
    while True:
        candidates, skipped, is_coordinator = _agree_on_candidates(root, number, group, read_only=read_only)
        for passed, reason in skipped.items():
            logger.warning("%s: step %d is not tried: %s", root.place, passed, reason)
        # Another process may have deleted all that was found, and saved a newer step: that is not tried yet.
        candidates = [step for step in candidates if _version(step) not in tried]
        if not candidates:
            break
        for step in candidates:
            tried.add(_version(step))
            try:
                result = load(state, checkpoint_id=root.place_of(step.folder), **group, **options)
            except CheckpointException as error:
                if number is not None or not _is_of_the_step(error, options):
                    raise
                first_error = first_error or error
                skipped[step.number] = str(error)
                _tell_of_damage(root, step, error, is_to_note=is_coordinator and not read_only)
                continue
            if is_coordinator and step.is_damaged and not read_only:
                root.forget_damage(step.folder, root.store.names())
            kept = result.user_metadata
            return RestoredStep(step.number, kept.get(METRICS, {}), kept.get(USER, {}), result, skipped)
    if first_error is not None:
        raise first_error
    if number is not None:
        there = [step.number for step in reversed(root.find_steps().usable)]
        text = f"{root.place}: there is no step {number}; there {'are' if there else 'is none'}"
        raise CheckpointNotFoundError(f"{text} {some_of(there, 5)}".rstrip(), path=root.place)
    return None


def _version(step: Step) -> tuple[str, Any]:
    """A step that is saved again has another one."""
    return step.folder, step.commit and step.commit.version


def _tell_of_damage(root: RunRoot, step: Step, error: CheckpointException, *, is_to_note: bool) -> None:
    logger.warning(
        "%s: step %d cannot be restored; the one before is tried. %s", root.place, step.number, error
    )
    if is_to_note and isinstance(error, IntegrityError) and step.commit:
        mark_damaged(root.store, step, str(error))


def _agree_on_candidates(
    root: RunRoot, number: int | None, group: Mapping[str, Any], *, read_only: bool
) -> tuple[list[Step], dict[int, str], bool]:
    """The steps to try, the best first, as rank 0 finds them; the newer ones that are not tried, and why; and
    whether this is rank 0.
    """

    def look() -> tuple[list[Step], dict[int, str]]:
        found = root.find_steps()
        if not found.steps:
            _refuse_other_places(root)
        if number is not None:
            step = found.find(number)
            return ([] if step is None else [step]), {}
        # If all are known to be damaged they are tried again: this is not a first start.
        candidates = (found.usable or [step for step in found if step.commit])[::-1]
        return candidates, _passed_over(found, candidates, with_incomplete=not read_only)

    with open_exchange(group["process_group"], purpose="restore", no_dist=group["no_dist"]) as exchange:
        candidates, passed = exchange.share("find the steps", look)
        return candidates, passed, exchange.is_coordinator


def _passed_over(found: StepList, candidates: list[Step], *, with_incomplete: bool) -> dict[int, str]:
    """The steps newer than all that can be restored, each with the reason; the newest first.

    Raises:
        OSError: One of them may be complete, and this process may not look into its folder.
    """
    passed = {}
    for step in reversed(found.steps):
        if candidates and step.order <= candidates[0].order:
            break
        if step.commit is not None:
            passed[step.number] = "a restore has found that it is damaged"
        elif step.unseen is not None:
            if step.unseen.errno != errno.EIO:
                raise step.unseen
            passed[step.number] = str(step.unseen)
        elif with_incomplete and step.folder not in found.deleting:
            passed[step.number] = (
                f"it is not complete: {step.folder} has no {METADATA}. Its save was cut off, or is still "
                "under way, or the file was removed"
            )
    return passed


def refuse_a_checkpoint(root: RunRoot, found: StepList) -> None:
    """Raise if the root is a checkpoint itself: its steps would lie among the files of that."""
    if not found.steps and METADATA in found.files:
        raise WrongFolderError(
            f"{root.place} is a checkpoint, not the folder of a run. Name the folder that has a folder for "
            "each step. (holdfast.load loads one checkpoint.)",
            path=root.place,
        )


def _refuse_other_places(root: RunRoot) -> None:
    """Raise if the root has steps under other names: then this is no first start."""
    folders = [folder for folder, commit in root.store.below(METADATA).folders.items() if commit is not None]
    names = guess_names(folders)
    complete = [folder for folder in folders if names.step(folder) is not None]
    if complete and names.form in KNOWN_FORMS:
        raise WrongFolderError(
            f"{root.place} has no step of this run, whose folders are called {root.names.form!r}, but it has "
            f"the checkpoints {', '.join(sorted(complete)[:5])}. Pass name={names.form!r} to go on from "
            "them, or another root to begin a new run.",
            path=root.place,
            found=sorted(complete),
        )


def _is_of_the_step(error: CheckpointException, options: Mapping[str, Any]) -> bool:
    """Whether another step may do: the load failed because of this one, and the state will not be mixed."""
    if isinstance(error, NewerFormatError) or (
        isinstance(error, UnsafeMetadataError) and error.step == "read"
    ):
        return False  # it is sound: this program is too old for it, or has not allowed a class
    is_damage = isinstance(error, IntegrityError | CheckpointNotFoundError)
    is_unreadable = isinstance(error, OSError) and error.errno == errno.EIO
    if not is_damage and not is_unreadable:
        return False
    return error.step != "read" or not any(map(options.get, _MAY_LEAVE_OUT))
