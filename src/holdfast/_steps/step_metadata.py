"""The metadata of steps, metrics above all: read from their commit files, and cached in the root.

The truth is in the metadata of each checkpoint, committed with it. The index in the root is only a cache, so
that a restart with a thousand steps reads one file and not a thousand: an entry counts as long as the commit
file has the version that the entry was made from. It may be missing, old, or lost at any time.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from holdfast._format.manifest import user_metadata_in
from holdfast._format.metadata_file import LARGEST_METADATA, split
from holdfast._format.names import METADATA
from holdfast._io import pool
from holdfast._io.store import ByteStore, FileSource
from holdfast._steps.policies import StepFacts
from holdfast._steps.root_files import INDEX, read_json, write_json
from holdfast._steps.step_list import Step
from holdfast.errors import CheckpointError

logger = logging.getLogger(__name__)

METRICS, USER, STEP = "metrics", "metadata", "step"
"""What the manager puts into the user metadata of a checkpoint."""


def read_user_metadata(place: FileSource) -> dict[str, Any]:
    """The user metadata of a checkpoint; empty if there is none, or if torch wrote it.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        IntegrityError: Its metadata is damaged.
    """
    path = f"{place.url}/{METADATA}"
    sections = split(place.read(METADATA, max_bytes=LARGEST_METADATA), path=path)
    return {} if sections.manifest is None else user_metadata_in(sections.manifest, path=path)


class StepMetadata:
    """The metadata of the steps of one root, as far as it has been asked for.

    Args:
        root: The root.
        open_step: Gives the store of a folder of the root.
    """

    def __init__(self, root: FileSource, open_step: Callable[[str], FileSource]) -> None:
        self._root = root
        self._open_step = open_step
        self._known: dict[str, tuple[str, dict[str, Any]]] = {}
        self._has_read_index = False
        self._in_index: set[str] = set()

    def of(self, steps: Sequence[Step], files: frozenset[str]) -> dict[int, dict[str, Any]]:
        """The metadata of these steps. A step whose metadata cannot be read is left out.

        Args:
            steps: Complete steps.
            files: The files of the root.
        """
        if not self._has_read_index and INDEX in files:
            for folder, entry in read_json(self._root, INDEX).items():
                if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], dict):
                    self._known.setdefault(folder, (entry[0], entry[1]))
            self._in_index = set(self._known)
        self._has_read_index = True
        unknown = [step for step in steps if self._entry(step) is None]
        pool.run(
            [partial(self._read, step) for step in unknown], threads=self._root.traits.requests_in_flight
        )
        found = {step.number: self._entry(step) for step in steps}
        return {number: values for number, values in found.items() if values is not None}

    def _entry(self, step: Step) -> dict[str, Any] | None:
        known = self._known.get(step.folder)
        return known[1] if known and step.commit and known[0] == step.commit.version else None

    def _read(self, step: Step) -> None:
        assert step.commit is not None
        try:
            self._known[step.folder] = (step.commit.version, read_user_metadata(self._open_step(step.folder)))
        except (CheckpointError, OSError) as error:
            logger.warning("%s/%s: its metrics cannot be read: %s", self._root.url, step.folder, error)

    def write_index(self, root: ByteStore, steps: Iterable[Step]) -> None:
        """Keep what is known for the next start, if there is anything new. Nothing is lost if this fails."""
        entries = {
            step.folder: [step.commit.version, values]
            for step in steps
            if step.commit is not None and (values := self._entry(step)) is not None
        }
        if entries.keys() != self._in_index:
            try:
                write_json(root, INDEX, entries, durable=False)
            except (CheckpointError, OSError, TypeError, ValueError) as error:
                logger.info("%s: the index of its steps was not written: %s", root.url, error)
            self._in_index = set(entries)


def facts_of(steps: Sequence[Step], metadata: Mapping[int, Mapping[str, Any]]) -> list[StepFacts]:
    """Steps as policies see them, in the same order."""
    return [
        StepFacts(step.number, step.time, _metrics(metadata.get(step.number)), step.is_pinned)
        for step in steps
    ]


def _metrics(values: Mapping[str, Any] | None) -> Mapping[str, Any]:
    metrics = (values or {}).get(METRICS)
    return metrics if isinstance(metrics, dict) else {}
