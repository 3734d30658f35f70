"""Deletes the steps of a run that a policy does not keep.

What is never deleted: the newest step that is complete and has all its files, the step that this process
saved last, what is pinned, what is not complete, what is known to be damaged, and folders that are links.
Before anything is deleted the files of the newest step are compared with its metadata: names and sizes, not
every byte.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast._format.foreign_manifest import data_files_in
from holdfast._format.metadata_file import LARGEST_METADATA
from holdfast._format.names import METADATA
from holdfast._io.store import ByteStore, FileSource
from holdfast._steps.policies import KeepPolicy, policies_in, steps_to_delete, unknown_metric
from holdfast._steps.root_files import damaged_name
from holdfast._steps.run_root import RunRoot
from holdfast._steps.step_deletion import delete_step, finish_deletion
from holdfast._steps.step_list import Step, StepList
from holdfast._steps.step_metadata import facts_of
from holdfast.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrunePlan:
    """The steps that a policy keeps, and those that it deletes.

    Attributes:
        found: All steps.
        kept: The complete and sound ones that stay, the newest last.
        doomed: Those to delete, the oldest first.
        unknown_metric: In words, that steps are deleted because no step has a metric whose best are kept.
    """

    found: StepList
    kept: tuple[Step, ...]
    doomed: tuple[Step, ...]
    unknown_metric: str | None


@dataclass
class Pruning:
    """Prunes one root, any number of times.

    Attributes:
        root: The root.
        keep: What is kept.
        in_use: Folders that are left alone, because somebody saves into them.
        saved_last: The folder that this process saved last. It is the newest step, unless another process
            saves below the same root.
        current: The folder that is being deleted.
        failed: How many deletions have failed so far. They are tried again the next time.
        warned: What was said already of a metric that no step has.
    """

    root: RunRoot
    keep: KeepPolicy
    in_use: set[str] = field(default_factory=set)
    saved_last: str | None = None
    current: str | None = None
    failed: int = 0
    warned: str | None = None

    def plan(self) -> PrunePlan:
        """Look at the root, and decide. Changes nothing."""
        found = self.root.find_steps()
        usable = found.usable
        while usable and self._problem_of(usable[-1]) is not None:
            usable.pop()
        needs_metrics = any(getattr(part, "needs_metrics", False) for part in policies_in(self.keep))
        metadata = self.root.metadata.of(usable, found.files) if needs_metrics else {}
        # What a link points to is elsewhere, and not ours to delete; or it is another step, which it needs.
        targets = {step.folder: self.root.link_target(step.folder) for step in usable}
        linked = {target for target in targets.values() if target}
        spared = {
            step.number
            for step in usable
            if step.folder == self.saved_last or step.folder in linked or targets[step.folder] is not None
        }
        facts = facts_of(usable, metadata)
        doomed = set(steps_to_delete(self.keep, facts)) - spared
        return PrunePlan(
            found,
            tuple(step for step in usable if step.number not in doomed),
            tuple(step for step in usable if step.number in doomed),
            unknown_metric(self.keep, facts) if doomed else None,
        )

    def _problem_of(self, step: Step) -> str | None:
        """Why a step is not whole; None if it is."""
        problem = find_problem(self.root.open_step(step.folder))
        if problem is not None:
            logger.warning(
                "%s/%s: is not whole, counts for nothing, and stays where it is: %s",
                *(self.root.store.url, step.folder, problem),
            )
        return problem

    def run(self, is_over: Callable[[], bool] = lambda: False) -> list[int]:
        """Finish deletions that were cut off, then delete what is not kept, one step after the other.

        A step that cannot be deleted is logged, and tried again the next time; the others go on.

        Args:
            is_over: Asked before each step whether to stop.

        Returns:
            The steps that were deleted.
        """
        plan = self.plan()
        if plan.unknown_metric not in (None, self.warned):
            # This is normal before the first evaluation, so deleting goes on: the disk must not fill.
            self.warned = plan.unknown_metric
            logger.warning(
                "%s: keep= asks for the best steps of a metric, but %s. Steps are deleted without regard "
                "to it. Pass metrics= when you save, with this name.",
                *(self.root.store.url, plan.unknown_metric),
            )
        self.root.settle_abandoned(plan.found)
        for folder in sorted(plan.found.deleting):
            if not is_over():
                self._attempt(folder, None)
        deleted = [step.number for step in plan.doomed if not is_over() and self._attempt(step.folder, step)]
        self.root.metadata.write_index(self.root.store, plan.kept)
        return deleted

    def _attempt(self, folder: str, step: Step | None) -> bool:
        """Delete a step, or, without one, finish a deletion; returns whether that was done."""
        store = self.root.store
        self.current = folder
        try:
            if folder in self.in_use:
                return False
            place = self.root.open_step(folder)
            if step is not None:
                return delete_step(store, place, step)
            finish_deletion(store, place, folder)
        except Exception as error:  # noqa: BLE001 - a stranger's file system may raise anything
            self.failed += 1
            logger.warning(
                "%s/%s could not be deleted now: %s. It is tried again at the next prune.",
                *(self.root.store.url, folder, error),
            )
            return False
        finally:
            self.current = None
        return True


def find_problem(place: FileSource) -> str | None:
    """What is wrong with a checkpoint, as its metadata and the names and sizes of its files tell; None if
    nothing is. The files themselves are not read.
    """
    path = f"{place.url}/{METADATA}"
    try:
        expected = data_files_in(place.read(METADATA, max_bytes=LARGEST_METADATA), path=path)
        if not expected or not place.can_list:
            return None
        there = place.list()
    except (CheckpointError, OSError) as error:
        return str(error)
    for name, nbytes in expected.items():
        if name not in there:
            return f"{name} is missing"
        if there[name] < nbytes:
            return f"{name} has {there[name]} bytes instead of {nbytes}"
    return None


def mark_damaged(root: ByteStore, step: Step, reason: str) -> None:
    """Remember that a step is damaged, until it is saved again. A failure is only logged."""
    assert step.commit is not None
    try:
        root.replace(damaged_name(step.folder, step.commit.version), reason.encode(errors="replace")[:4096])
    except (CheckpointError, OSError) as error:
        logger.warning("%s: cannot note that %s is damaged: %s", root.url, step.folder, error)
