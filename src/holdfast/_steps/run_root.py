"""The root of a run: its store, the stores of its steps, and what is known of them."""

import os
from collections.abc import Iterable
from typing import Any

from holdfast._format.names import METADATA
from holdfast._io.places import local_path, open_place, path_text, without_end_slashes
from holdfast._io.store import ByteStore
from holdfast._steps.root_files import (
    ABANDONED,
    RUN,
    Abandoned,
    marks_of_damage,
    pinned_name,
    read_abandoned,
    read_json,
    write_abandoned,
    write_json,
)
from holdfast._steps.step_list import StepList, describe_steps, find_steps
from holdfast._steps.step_metadata import StepMetadata
from holdfast._steps.step_names import StepNames


class RunRoot:
    """The root of a run.

    Args:
        place: Its path or URL.
        names: How the folders of its steps are called.

    Attributes:
        place: The path or URL, without a slash at its end.
        store: The root as a store.
        names: How the folders of its steps are called.
        metadata: What was kept with the steps.

    Raises:
        UsageError: No store serves such a place, or it is no path at all.
    """

    def __init__(self, place: str | os.PathLike[str], names: StepNames) -> None:
        path = path_text(place, "the root of a run")
        folder = local_path(path)
        # A run may change its working directory.
        self.place = os.path.abspath(folder) if folder is not None else without_end_slashes(path)
        self.store: ByteStore = open_place(self.place)
        self.names = names
        self.metadata = StepMetadata(self.store, self.open_step)

    def place_of(self, folder: str) -> str:
        """The path or URL of a folder."""
        return f"{self.place.rstrip('/')}/{folder}"

    def open_step(self, folder: str) -> ByteStore:
        """The store of a folder."""
        return open_place(self.place_of(folder))

    def link_target(self, folder: str) -> str | None:
        """Where a folder of the root leads to if it is a link: a folder of the root, or "" for one elsewhere.

        None if it is no link.
        """
        path = local_path(self.place_of(folder))
        if path is None or not os.path.islink(path):
            return None
        above, name = os.path.split(os.path.realpath(path))
        return name if above == os.path.realpath(os.path.dirname(path)) else ""

    def find_steps(self) -> StepList:
        """All steps, by one look at the root."""
        return find_steps(self.store, self.names)

    def find_newest(self) -> StepList:
        """The steps as far as needed to know the newest complete one, by few requests.

        On an object store only names are listed, and the newest are asked for one by one until one is
        complete: all others count as not complete. Elsewhere this is the same as ``find_steps``.
        """
        if self.store.traits.looks_below:
            return self.find_steps()
        below = self.store.below()
        folders = below.folders
        listed = describe_steps(self.store, self.names, below)
        numbers = {step.folder: step.number for step in listed}
        if ABANDONED in below.files:
            return self.find_steps()
        for folder in sorted(numbers, key=numbers.__getitem__, reverse=True):
            facts = self.open_step(folder).facts(METADATA)
            if facts is not None:
                folders[folder] = facts
                found = describe_steps(self.store, self.names, below)
                if found.usable:
                    return found
        return listed

    def abandon_after(self, step: int, found: StepList) -> list[int]:
        """The run goes back to ``step``: once that is saved, later steps are not its newest ones any more.

        Returns:
            These steps.
        """
        later = [other for other in found if other.commit and other.number > step and not other.is_abandoned]
        target = found.find(step)
        self.store.make()
        write_abandoned(
            self.store,
            Abandoned(
                {
                    other.folder: other.commit.version
                    for other in found
                    if other.commit and other.is_abandoned
                },
                {other.folder: other.commit.version for other in later if other.commit},
                self.names.folder(step),
                target.commit.version if target and target.commit else None,
            ),
        )
        return [other.number for other in later]

    def settle_abandoned(self, found: StepList) -> None:
        """Before steps are deleted: note for good what the run has left behind, if that depends on a step."""
        noted, folders = read_abandoned(self.store, found.files), {step.folder: step.commit for step in found}
        if noted.has_committed(folders):
            write_abandoned(self.store, Abandoned(noted.settled(folders)))

    def pin(self, folder: str) -> None:
        """Pin a step: it is kept even if the policy would delete it."""
        self.store.replace(pinned_name(folder), b"")

    def unpin(self, folder: str) -> None:
        """Leave a step to the policy again."""
        self.store.delete([pinned_name(folder)])

    def forget_damage(self, folder: str, files: Iterable[str]) -> None:
        """A step was found to be sound."""
        self.store.delete(marks_of_damage(folder, files))

    def read_run_metadata(self) -> dict[str, Any]:
        """The metadata of the run."""
        return read_json(self.store, RUN)

    def write_run_metadata(self, values: dict[str, Any]) -> None:
        """Keep something of the run."""
        self.store.make()
        write_json(self.store, RUN, values)
