"""Finds the steps of a run: which there are below a root, and which of them are complete.

``find_steps`` looks once at the root, over any store. The commit file of a folder makes its step complete,
whoever wrote it: stock torch's checkpoints count too. All else that is known of a step stands in the names of
small files of the root (``root_files``), so that no file needs to be read.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast._format.names import METADATA
from holdfast._io.store import Below, FileFacts, FileSource
from holdfast._steps.root_files import damaged_name, pinned_name, read_abandoned, steps_being_deleted
from holdfast._steps.step_names import StepNames


@dataclass(frozen=True)
class Step:
    """A step, as far as it is known without reading its files.

    Attributes:
        number: The step.
        folder: The name of its folder.
        commit: The facts of its commit file; None if it is not complete.
        is_pinned: Whether somebody asked to keep it.
        is_damaged: Whether a restore found it damaged, and it was not saved again since.
        is_abandoned: Whether the run went back to an earlier step since, and this one was not saved again.
        unseen: Why nobody knows whether it is complete: its folder could not be looked into.
    """

    number: int
    folder: str
    commit: FileFacts | None
    is_pinned: bool = False
    is_damaged: bool = False
    is_abandoned: bool = False
    unseen: OSError | None = None

    @property
    def is_usable(self) -> bool:
        """Whether it is complete, and not known to be damaged."""
        return self.commit is not None and not self.is_damaged

    @property
    def order(self) -> tuple[bool, int]:
        """By this the steps of a run are sorted, the newest last."""
        return not self.is_abandoned, self.number

    @property
    def time(self) -> float | None:
        """When it was committed, in seconds since 1970 by the clock of the store."""
        if self.commit is None or self.commit.modified_ns is None:
            return None
        return self.commit.modified_ns / 1e9


@dataclass(frozen=True)
class StepList:
    """The steps of a root, the newest last.

    Attributes:
        steps: All of them, complete or not.
        files: The names of the files of the root.
        deleting: Folders whose deletion has begun, and has not ended.
    """

    steps: tuple[Step, ...]
    files: frozenset[str]
    deleting: frozenset[str]

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    @property
    def usable(self) -> list[Step]:
        """Those that a restore would try, the newest last."""
        return [step for step in self.steps if step.is_usable]

    def find(self, number: int) -> Step | None:
        """The step of a number, complete or not; None if there is no such folder."""
        return next((step for step in self.steps if step.number == number), None)


def find_steps(root: FileSource, names: StepNames) -> StepList:
    """The steps below a root, with one look at it. A root that does not exist has none.

    Args:
        root: The root.
        names: How its folders are called. Others are ignored.

    Raises:
        UsageError: Folders cannot be listed on such a storage.
        OSError: The root cannot be read.
    """
    return describe_steps(root, names, root.below(METADATA))


def describe_steps(root: FileSource, names: StepNames, below: Below) -> StepList:
    """The steps in a listing of the root. Reads a file only if the run has ever gone back."""
    files, folders, unseen = below
    abandoned = read_abandoned(root, files).settled(folders)
    found: dict[int, Step] = {}
    for folder, commit in folders.items():
        number = names.step(folder)
        if number is None:
            continue
        step = Step(
            number,
            folder,
            commit,
            is_pinned=pinned_name(folder) in files,
            is_damaged=commit is not None and damaged_name(folder, commit.version) in files,
            is_abandoned=commit is not None and abandoned.get(folder) == commit.version,
            unseen=unseen.get(folder),
        )
        # Two folders may have one number, such as step-7 and step-007: the complete one counts, or ours.
        other = found.get(number)
        if other is None or (commit is not None, folder == names.folder(number)) > (
            other.commit is not None,
            other.folder == names.folder(number),
        ):
            found[number] = step
    return StepList(
        tuple(sorted(found.values(), key=lambda step: step.order)),
        frozenset(files),
        frozenset(steps_being_deleted(files)),
    )
