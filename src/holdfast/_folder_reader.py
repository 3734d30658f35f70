"""Reading a checkpoint from a folder of a file system."""

import os
import uuid
from collections.abc import Callable
from typing import Any

from torch.futures import Future

from holdfast._file_system import FileSystem, FileSystemBase
from holdfast._folder_writer import DEFAULT_BUDGET
from holdfast._foreign import called_by_torch, our_load_planner, to_ours, to_torch
from holdfast._io.local import LocalStore
from holdfast._io.store import ByteStore
from holdfast._known_methods import known_to_engine
from holdfast._ranks.exchange import Exchange
from holdfast._storage.reading import read_items, read_metadata_file, read_own_parts
from holdfast._storage.shared_reads import read_together
from holdfast.errors import UsageError
from holdfast.extension import ExtensionRegistry
from holdfast.metadata import Metadata, StorageMeta
from holdfast.planner import LoadPlan, LoadPlanner
from holdfast.storage import StorageReader

__all__ = ["FileSystemReader"]

_READ_THREADS = 4


class FileSystemReader(StorageReader):
    """Reads a checkpoint from a folder, ours or torch's.

    Only the bytes that are needed are read. Of our checkpoints each is checked; of torch's, each tensor
    that is read whole. The folder needs to be readable, nothing more.

    Args:
        path: The folder.
        _extension_registry: Knows stream transforms besides the built-in ones.
        thread_count: How many threads read.
        memory_budget: The most bytes of memory taken besides the state.
        verify: Compare checksums. False finds no damage.
        allow_pickle: Let planner data in the metadata be unpickled freely, running what code it holds.
        share_reads: Let one rank read what several need, and pass it on: storage is asked for each byte
            once. False: each rank reads what it needs, which is faster where storage is as fast as memory.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: ExtensionRegistry | None = None,
        *,
        thread_count: int = _READ_THREADS,
        memory_budget: int = DEFAULT_BUDGET,
        verify: bool = True,
        allow_pickle: bool = False,
        share_reads: bool = True,
    ) -> None:
        if thread_count < 1:
            raise UsageError(f"thread_count must be at least 1, not {thread_count}")
        self.fs: FileSystemBase = FileSystem()
        self.path = self.fs.init_path(path)
        self.registry = _extension_registry or ExtensionRegistry()
        self.thread_count = thread_count
        self.memory_budget = memory_budget
        self.verify = verify
        self.allow_pickle = allow_pickle
        self.share_reads = share_reads
        self.load_id = uuid.uuid4().hex
        self.storage_data: dict[Any, Any] = {}
        self.rank: int | None = None
        self.use_collectives = True
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, from another folder if one is named."""
        if checkpoint_id:
            self.path = self.fs.init_path(checkpoint_id)
        self.load_id = uuid.uuid4().hex
        self.storage_data = {}
        self._metadata = None

    def _store(self) -> ByteStore:
        return LocalStore(os.fspath(self.path))

    @known_to_engine
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """The checkpoint's metadata; with ``rank``, as that rank sees what ranks wrote each for itself."""
        store, rank = self._store(), kwargs.get("rank")
        if rank is None:
            metadata = read_metadata_file(store, allow_pickle=self.allow_pickle)
        else:
            metadata = read_own_parts(
                store, rank=rank, world_size=kwargs.get("world_size"), allow_pickle=self.allow_pickle
            )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        if called_by_torch(self):
            theirs: Metadata = to_torch(metadata)
            return theirs
        return metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: ARG002
        *args: Any,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """Keep the metadata."""
        self._metadata = to_ours(metadata)
        self.storage_data = self._metadata.storage_data
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    @known_to_engine
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    @known_to_engine
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Read what the plan asks for, and hand it to the planner."""
        self._read(self._store(), to_ours(plan), our_load_planner(planner), None)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, store: ByteStore, plan: LoadPlan, planner: LoadPlanner, threads: int | None) -> None:
        if self._metadata is None:
            raise UsageError("set_up_storage_reader must be called before read_data")
        read_items(
            store,
            plan,
            planner,
            self._metadata,
            registry=self.registry,
            threads=threads or self.thread_count,
            budget=self.memory_budget,
            verify=self.verify,
        )

    def read_data_together(
        self, finish_plan: Callable[[], LoadPlan], planner: LoadPlanner, exchange: Exchange
    ) -> Callable[[], None]:
        """As ``read_data``, on all ranks of an exchange: what several of them need is read once.

        Returns:
            What does it, to be called on every rank.
        """
        assert self._metadata is not None

        def read(store: ByteStore, part: LoadPlan, threads: int | None) -> None:
            self._read(store, part, planner, threads)

        return read_together(
            self._store(), finish_plan, planner, self._metadata, exchange, read, willing=self.share_reads
        )

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The folder."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a place in a file system."""
        return FileSystem.validate_checkpoint_id(checkpoint_id)
