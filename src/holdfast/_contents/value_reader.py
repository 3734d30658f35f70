"""Owns reading many values of a checkpoint at once: in parallel, and small neighbours in one request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from holdfast._byte_ranges import USUAL, Thrift
from holdfast._contents.box_reader import box_jobs
from holdfast._contents.box_target import StoredBox
from holdfast._contents.item_bytes import ItemBytes, ItemFile, ItemRules, naming
from holdfast._contents.object_bytes import ObjectBytes, read_object
from holdfast._contents.open_files import OpenFiles, StoredFile
from holdfast._contents.read_window import group_neighbours, read_window
from holdfast._format.item_table import StorageInfo
from holdfast._io import pool
from holdfast._io.pool import Budget, Cancellation
from holdfast._io.store import FileSource
from holdfast.errors import CheckpointNotFoundError, IncompleteCheckpointError
from holdfast.extension import ExtensionRegistry

_BUDGET = 256 << 20
"""The most scratch memory that is taken at once."""
_MOST_OPEN = 32

_LEAN = Thrift(waste=1.1, always_fine=4096)
"""For a store where a request costs next to nothing."""

Job = Callable[[], None]


class Part(Protocol):
    """Something that is read of one item."""

    @property
    def info(self) -> StorageInfo:
        """Where the item lies."""

    def jobs(self, rules: ItemRules, file: ItemFile) -> list[Job]:
        """What reads it."""


@dataclass
class ObjectPart:
    """A value that is not a tensor; ``stored`` has it once it is read."""

    key: str
    info: StorageInfo
    stored: ObjectBytes | None = None

    def jobs(self, rules: ItemRules, file: ItemFile) -> list[Job]:
        """What reads it; see ``Part``."""

        def job() -> None:
            with naming(self.key):
                self.stored = read_object(ItemBytes(rules, file, self.info))

        return [job]


@dataclass
class TensorPart:
    """A box of one stored chunk."""

    stored: StoredBox

    @property
    def info(self) -> StorageInfo:
        """Where the chunk lies; see ``Part``."""
        return self.stored.info

    def jobs(self, rules: ItemRules, file: ItemFile) -> list[Job]:
        """What reads it; see ``Part``."""
        return box_jobs(ItemBytes(rules, file, self.info), self.stored)


class ValueReader:
    """Reads values of one place. Its methods may be called from any thread.

    Args:
        store: The place.
        verify: Whether checksums are compared.
        registry: Makes transforms from their descriptors.
    """

    def __init__(
        self, store: FileSource, *, verify: bool = True, registry: ExtensionRegistry | None = None
    ) -> None:
        self._store = store
        self._files = OpenFiles(store, most=_MOST_OPEN)
        self._verify = verify
        self._registry = registry or ExtensionRegistry()

    def close(self) -> None:
        """Close the files. Whatever is read after this raises UsageError."""
        self._files.close()

    def read(self, parts: Sequence[Part]) -> None:
        """Read all of these parts.

        Raises:
            IncompleteCheckpointError: A file is missing.
            IntegrityError: One is damaged.
        """
        traits = self._store.traits
        is_far = traits.read_gap_nbytes > USUAL.always_fine // 4
        cancellation, thrift = Cancellation(), USUAL if is_far else _LEAN
        budget = Budget(_BUDGET, cancellation)
        rules = ItemRules(self._store, self._registry, cancellation, budget, self._verify, thrift)
        jobs: list[Job] = []
        in_order = sorted(parts, key=lambda part: (part.info.relative_path, part.info.offset))
        for group in group_neighbours(in_order, lambda part: part.info, traits):
            name = group[0].info.relative_path
            if len(group) == 1:
                jobs += group[0].jobs(rules, StoredFile(self._files, name))
            else:
                jobs.append(partial(self._read_window, group, rules))
        try:
            pool.run(jobs, threads=traits.requests_in_flight, cancellation=cancellation)
        except CheckpointNotFoundError as error:
            raise IncompleteCheckpointError(
                f"{error} The metadata names it: it was deleted, or was not copied with the rest. Put it "
                "back, or read another checkpoint.",
                key=error.key,
                path=error.path,
            ) from error

    def _read_window(self, group: list[Part], rules: ItemRules) -> None:
        file = StoredFile(self._files, group[0].info.relative_path)
        window = read_window(file, [part.info for part in group], verify=rules.verify)
        for part in group:
            for job in part.jobs(rules, window):
                job()
