"""Writing a checkpoint into a folder of a file system."""

import dataclasses
import functools
import os
import uuid
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from holdfast._context import SaveContext
from holdfast._file_system import FileSystem, FileSystemBase
from holdfast._foreign import our_save_planner, to_ours, to_torch
from holdfast._format.metadata_file import FILE_NAME
from holdfast._io.local import LocalStore
from holdfast._io.store import ByteStore, Claim
from holdfast._plan.metadata_entries import directory_of
from holdfast._storage.committed import CommittedMetadata
from holdfast._storage.item_places import ItemPlaces, StorageData
from holdfast._storage.metadata_writing import VERSION, make_manifest
from holdfast._storage.results import result_columns
from holdfast._storage.writing import (
    commit,
    discard,
    existing_checkpoint,
    remove_unreferenced,
    write_items,
)
from holdfast.errors import CheckpointExistsError, UsageError
from holdfast.extension import StreamTransformExtension
from holdfast.metadata import Metadata, StorageMeta
from holdfast.planner import SavePlan, SavePlanner
from holdfast.staging import BlockingAsyncStager
from holdfast.storage import StorageWriter, WriteResult

__all__ = ["DEFAULT_BUDGET", "FileSystemWriter", "SerializationFormat"]

DEFAULT_SUFFIX = ".distcp"
DEFAULT_BUDGET = 256 * 1024 * 1024
"""The most memory that a save or a load takes besides what it saves from or loads into."""
# Compression keeps a core busy: one file, and so one thread, each.
_TRANSFORM_THREADS = min(4, os.cpu_count() or 1)


class SerializationFormat(Enum):
    """How tensors are stored: as ``torch.load`` reads them, or as safetensors files."""

    TORCH_SAVE = "torch_save"
    SAFETENSORS = "safetensors"


@dataclasses.dataclass(frozen=True)
class _FilePrefix:
    """How a rank's files are called: its own prefix, and what tells this save from all others."""

    prefix: str
    save: str


class FileSystemWriter(StorageWriter, BlockingAsyncStager):
    """Writes a checkpoint into a folder.

    Until ``finish`` the folder's old checkpoint is there, whole; after it, the new one. Every save writes
    files of its own, so that it never touches another's; what nobody refers to is removed afterwards.

    Args:
        path: The folder; made if it does not exist.
        single_file_per_rank: One file for each thread of a rank. False: a file for each item.
        sync_files: Wait until files are on stable storage. Without it a crash of the machine, not of the
            program, may lose the checkpoint.
        thread_count: How many threads write, each into a file of its own. One is enough for most disks.
        per_thread_copy_ahead: Accepted for compatibility; ``memory_budget`` bounds what is copied ahead.
        cache_staged_state_dict: What ``stage`` does with its buffers, if you call it: ``async_save`` has
            buffers of its own, which it keeps.
        overwrite: Whether a checkpoint that is in the folder may be replaced.
        _extensions: Stream transforms that each item goes through; the first one stands next to the file.
        serialization_format: Only ``TORCH_SAVE``.
        torch_compatible: Write what stock torch needs to read the checkpoint, too.
        memory_budget: The most bytes of memory taken besides the state.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        *,
        torch_compatible: bool = True,
        memory_budget: int = DEFAULT_BUDGET,
    ) -> None:
        if thread_count < 1:
            raise UsageError(f"thread_count must be at least 1, not {thread_count}")
        if serialization_format is not SerializationFormat.TORCH_SAVE:
            raise UsageError(
                "FileSystemWriter writes TORCH_SAVE only; safetensors have a writer of their own"
            )
        self.fs: FileSystemBase = FileSystem()
        self.path = self.fs.init_path(path)
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.thread_count = thread_count
        self.per_thread_copy_ahead = per_thread_copy_ahead
        BlockingAsyncStager.__init__(self, cache_staged_state_dict)
        self.overwrite = overwrite
        self.extensions = tuple(_extensions or ())
        self.serialization_format = serialization_format
        self.torch_compatible = torch_compatible
        self.memory_budget = memory_budget
        self.save_id = uuid.uuid4().hex
        self.rank: int | None = None
        self.use_collectives = True
        self._world_size = 1
        self._context = SaveContext()
        self._claim: Claim | None = None
        self._written: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_context": SaveContext(self._context.rank), "_claim": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, at another folder if one is named."""
        self._let_go()
        if checkpoint_id:
            self.path = self.fs.init_path(checkpoint_id)
        self.save_id = uuid.uuid4().hex

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Learn the rank, and whether ranks write one checkpoint together."""
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)
        self._context = kwargs.get("context") or SaveContext()

    def _store(self) -> ByteStore:
        return LocalStore(os.fspath(self.path))

    @property
    def _own_rank(self) -> int | None:
        """The rank whose part alone is being written; None where ranks write together."""
        return None if self.use_collectives else self.rank

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the folder, and refuse to replace a checkpoint unless that is allowed."""
        store = self._store()
        store.make()
        there = None if self.overwrite else existing_checkpoint(store)
        if not self.overwrite and os.path.islink(os.path.join(self.path, FILE_NAME)):
            there = FILE_NAME
        if there is not None:
            raise CheckpointExistsError(
                f"Checkpoint already exists: {self.path} has {there}, and overwrite=False was given",
                path=str(self.path),
            )
        if self._own_rank is not None:
            if store.exists(FILE_NAME):
                raise CheckpointExistsError(
                    f"{self.path} has a checkpoint that ranks wrote together, which a load would prefer to "
                    "a rank's own part. Remove it, or save to another folder.",
                    path=str(self.path),
                )
            self._claim = store.claim(shared=True)
            return dataclasses.replace(plan, storage_data=self._prefix(self._own_rank))
        return plan

    def _prefix(self, rank: int) -> _FilePrefix:
        return _FilePrefix(f"__{rank}_", self.save_id[:12])

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Claim the folder, and tell each rank what its files are called."""
        self._world_size = len(plans)
        if self._claim is None:
            self._claim = self._store().claim()
        return [
            dataclasses.replace(plan, storage_data=self._prefix(rank)) if plan.storage_data is None else plan
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Write every item into new files, and wait until the disk has them."""
        self.expect_files(plan)
        results = write_items(
            self._store(),
            to_ours(plan),
            our_save_planner(planner),
            name_file=functools.partial(_file_name, plan.storage_data),
            one_file=self.single_file_per_rank,
            threads=self._threads,
            durable=self.sync_files,
            transforms=self.extensions,
            budget=self.memory_budget,
            progress=self._context.progress,
        )
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    @property
    def _threads(self) -> int:
        return max(self.thread_count, _TRANSFORM_THREADS) if self.extensions else self.thread_count

    def expect_files(self, plan: SavePlan) -> None:
        """Remember the files that ``write_data`` makes at most, here or in another process."""
        count = self._threads if self.single_file_per_rank else len(plan.items)
        self._written = [_file_name(plan.storage_data, number) for number in range(count)]

    def abandon(self, *, outcome_is_known: bool = True) -> None:
        """After a save that failed: remove what this rank has written for it, and let others in.

        Args:
            outcome_is_known: False where the coordinator may have committed it all the same, or may still
                do so: then nothing is removed.
        """
        written = self._written
        self._let_go()
        if outcome_is_known:
            discard(self._store(), written, save_id=self.save_id, rank=self._own_rank)

    def _let_go(self) -> None:
        self._written = []
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, then remove what the checkpoint does not use."""
        ours: Metadata = to_ours(metadata)
        ours.version = VERSION
        ours.storage_meta = self.storage_meta()
        columns = [result_columns(to_ours(of_rank)) for of_rank in results]
        world_size = self._world_size if self._own_rank is None else _group_size()
        manifest = make_manifest(ours, columns, world_size=world_size)
        ours.storage_data = StorageData(ItemPlaces(manifest, directory_of(ours)))
        store, rank = self._store(), self._own_rank
        try:
            commit(
                store,
                ours,
                manifest,
                name=FILE_NAME if rank is None else f"__{rank}{FILE_NAME}",
                durable=self.sync_files,
                torch_compatible=self.torch_compatible,
                confirm=self._context.confirm_commit,
            )
        except BaseException:
            discard(store, manifest.file_names, save_id=self.save_id, rank=rank)
            raise
        remove_unreferenced(store, manifest, only_rank=rank)
        self._let_go()
        if ours is not metadata:
            theirs = to_torch(ours)
            metadata.version, metadata.storage_meta = theirs.version, theirs.storage_meta
            metadata.storage_data = theirs.storage_data

    def how_to_find_metadata(self, metadata: Metadata) -> CommittedMetadata:
        """What other ranks need to find the metadata of this save later, if they want to see it."""
        return CommittedMetadata.of(metadata, self.save_id)

    def metadata_later(self, told: CommittedMetadata) -> Metadata:
        """The metadata of a save that this rank took part in, read from storage when somebody looks at it."""
        return told.as_metadata(self._store(), self.checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """The folder and the save's own id."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The folder."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a place in a file system."""
        return FileSystem.validate_checkpoint_id(checkpoint_id)


def _file_name(names: _FilePrefix, number: int) -> str:
    return f"{names.prefix}{number}-{names.save}{DEFAULT_SUFFIX}"


def _group_size() -> int:
    """How many ranks there are besides the one that writes its own part."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
