"""Owns the storage writer over any store: claim the place, write data files, commit, clean up."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from holdfast._context import SaveContext
from holdfast._format.description import ints
from holdfast._format.manifest import Manifest
from holdfast._format.names import (
    METADATA,
    SAVE_DIGITS,
    data_file_name,
    metadata_name,
    shows_a_checkpoint,
)
from holdfast._io.lease import Lease, take_lease
from holdfast._io.store import ByteStore
from holdfast._plan.metadata_entries import directory_of
from holdfast._plan.write_columns import columns_of
from holdfast._storage.arrival_check import check_arrived
from holdfast._storage.cleanup import (
    abort_uploads_of,
    discard_files,
    files_named_by,
    files_of_save,
    files_to_replace,
    known_by,
    remove_dead,
    remove_replaced,
)
from holdfast._storage.committed import CommittedMetadata
from holdfast._storage.item_places import ItemPlaces, StorageData
from holdfast._storage.item_streams import DEFAULT_SUFFIX
from holdfast._storage.metadata_writing import VERSION, dump_manifest, make_manifest
from holdfast._storage.results import result_columns
from holdfast._storage.store_place import AtStore, new_id
from holdfast._storage.writing import write_items
from holdfast._torch_compat.torch_plugins import our_save_planner
from holdfast._torch_compat.torch_records import to_ours, to_torch
from holdfast.errors import (
    AccessDeniedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    StorageError,
)
from holdfast.extension import StreamTransformExtension
from holdfast.metadata import Metadata, StorageMeta
from holdfast.planner import SavePlan, SavePlanner
from holdfast.storage import StorageWriter, WriteResult

DEFAULT_BUDGET = 256 * 1024 * 1024
"""The most memory that a save or a load takes besides what it saves from or loads into."""
# Compression keeps a core busy: one file, and so one thread, each.
_TRANSFORM_THREADS = min(4, os.cpu_count() or 1)
# A save of less by a single rank does not renew its lease.
_FEW_ITEMS, _FEW_BYTES = 100, 64 << 20


@dataclass(frozen=True)
class FilePrefix:
    """What the files of a rank are called after: the rank, and the save.

    Attributes:
        spread: Whether the names begin differently, for stores that limit requests by the begin of names.
    """

    rank: int
    save: str
    spread: bool = False

    def name(self, number: int) -> str:
        """The name of the rank's file ``number``."""
        return data_file_name(self.rank, number, self.save, spread=self.spread)

    @property
    def prefix(self) -> str:
        """What writers of other files put before their number; no other save has the same."""
        return f"__{self.rank}_{int(self.save[:SAVE_DIGITS], 16):015}"


@dataclass(eq=False, repr=False)
class StoreWriter(AtStore[ByteStore], StorageWriter):
    """Writes a checkpoint into a store: what ``FileSystemWriter`` promises, with its arguments.

    Args:
        _store: The place; None for a subclass that has its own property ``store``.
        extensions: What is ``_extensions`` there.
        spread_names: As in ``ObjectStoreWriter``.

    Attributes:
        context: The save that is being served.
    """

    _store: Any
    _: KW_ONLY
    single_file_per_rank: bool = True
    sync_files: bool = True
    thread_count: int = 1
    overwrite: bool = True
    extensions: Sequence[StreamTransformExtension] = ()
    torch_compatible: bool = True
    memory_budget: int = DEFAULT_BUDGET
    spread_names: bool = False
    save_id: str = field(init=False, default_factory=new_id)
    rank: int | None = field(init=False, default=None)
    use_collectives: bool = field(init=False, default=True)
    context: SaveContext = field(init=False, default_factory=SaveContext)
    _world_size: int = field(init=False, default=1)
    _lease: Lease | None = field(init=False, default=None)
    _written: list[str] = field(init=False, default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lease": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, at another place if one is named."""
        self._release()
        if checkpoint_id:
            self._move_to(checkpoint_id)
        self.save_id = new_id()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Learn of the save: its context, this rank, and whether ranks write one checkpoint together."""
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)
        self.context = kwargs.get("context") or SaveContext(is_coordinator=is_coordinator)

    @property
    def _own_rank(self) -> int | None:
        """The rank whose part alone is being written; None where ranks write together."""
        return None if self.use_collectives else self.rank

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the place, and refuse to replace a checkpoint unless that is allowed."""
        self.store.make()
        self._refuse_existing()
        if self._own_rank is None:
            return plan
        self._take_lease()
        return replace(plan, storage_data=self._file_prefix(self._own_rank))

    def _file_prefix(self, rank: int) -> FilePrefix:
        return FilePrefix(rank, self.save_id, self.spread_names)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Claim the place for this save, and tell each rank what its files are called."""
        self._world_size = len(plans)
        self._take_lease()
        first = self._own_rank or 0
        return [
            # A planner that caches plans may return those of an earlier save.
            replace(plan, storage_data=self._file_prefix(rank))
            if plan.storage_data is None or isinstance(plan.storage_data, FilePrefix)
            else plan
            for rank, plan in enumerate(plans, first)
        ]

    def _refuse_existing(self) -> None:
        """Raise CheckpointExistsError if there is a checkpoint that this save must not replace."""
        store, rank = self.store, self._own_rank
        there = None if self.overwrite else _existing_checkpoint(store, rank)
        if there is not None:
            raise CheckpointExistsError(
                f"Checkpoint already exists: {store.url} has {there}, and overwrite=False was given",
                path=store.url,
            )
        if rank is not None and store.exists(METADATA):
            raise CheckpointExistsError(
                f"{store.url} has a checkpoint that ranks wrote together, which a load would prefer to "
                "a rank's own part. Remove it, or save to another folder.",
                path=store.url,
            )

    def _take_lease(self) -> None:
        if self._lease is None:
            self._lease = take_lease(self.store, self.save_id, shared=self._own_rank is not None)
            try:
                # Another save may have committed since this one looked.
                self._refuse_existing()
            except BaseException:
                self._release()
                raise
            remove_dead(self.store, self._lease)
        if self._world_size > 1:
            self._lease.keep()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Write every item into new files, and wait until the storage has them."""
        self.expect_files(plan)
        try:
            results = write_items(
                self.store,
                to_ours(plan),
                our_save_planner(planner),
                name_file=partial(self._file_name, plan.storage_data),
                one_file=self.single_file_per_rank,
                threads=self._threads,
                durable=self.sync_files,
                transforms=self.extensions,
                budget=self.memory_budget,
                progress=self.context.progress,
            )
        except BaseException:
            # A program that saves without our engine may never say that the save is over.
            if self._lease is not None:
                self._lease.pause()
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _file_name(self, told: Any, number: int) -> str:
        """The name of a file of this rank. Subclasses may tell ranks any object with a ``prefix``."""
        if isinstance(told, FilePrefix):
            return told.name(number)
        # No other save has this name: the files of the one before stay until this one is complete.
        return f"{told.prefix}{number}-{self.save_id[:SAVE_DIGITS]}{DEFAULT_SUFFIX}"

    @property
    def _threads(self) -> int:
        return max(self.thread_count, _TRANSFORM_THREADS) if self.extensions else self.thread_count

    def expect_files(self, plan: SavePlan) -> None:
        """Remember the files that ``write_data`` makes at most, here or in another process."""
        count = self._threads if self.single_file_per_rank else len(plan.items)
        self._written = [self._file_name(plan.storage_data, number) for number in range(count)]
        self._keep_lease(plan)

    def _keep_lease(self, plan: SavePlan) -> None:
        """Have the lease renewed while a plan is written."""
        # What takes milliseconds is over before anybody takes it for dead; a thread would be half its cost.
        is_short = (
            len(plan.items) <= _FEW_ITEMS and sum(columns_of(to_ours(plan)).item_nbytes()) <= _FEW_BYTES
        )
        if self._lease is not None and not is_short:
            self._lease.keep()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, then remove what the checkpoint does not use."""
        ours: Metadata = to_ours(metadata)
        ours.version = VERSION
        ours.storage_meta = self.storage_meta()
        columns = [result_columns(to_ours(of_rank)) for of_rank in results]
        world_size = self._world_size if self._own_rank is None else _group_size()
        recorder = self.context.recorder
        manifest = make_manifest(
            ours,
            columns,
            world_size=world_size,
            record=None if recorder is None else recorder.at_commit,
            user_metadata=self.context.user_metadata,
        )
        ours.storage_data = StorageData(ItemPlaces(manifest, directory_of(ours)))
        self._take_lease()
        others = self._files_of_others(manifest)
        self._written = manifest.file_names
        with self._discarding_on_failure():
            self._commit(ours, manifest, others)
        if ours is not metadata:
            fill_metadata(metadata, to_torch(ours), ("version", "storage_meta", "storage_data"))

    @contextlib.contextmanager
    def _discarding_on_failure(self) -> Iterator[None]:
        """Commit in a with-block: a failure removes what was written. Others are let in at the end."""
        try:
            yield
        except BaseException:
            self._discard_written()
            raise
        finally:
            self._release()

    def _commit(self, metadata: Metadata, manifest: Manifest, of_others: Mapping[str, int]) -> None:
        """Make the checkpoint exist by one atomic replace of its metadata file, and clean up after it."""
        assert self._lease is not None
        store, rank = self.store, self._own_rank
        check_arrived(store, of_others)
        replaced = files_to_replace(store, rank=rank)
        pieces = dump_manifest(manifest, metadata, torch_compatible=self.torch_compatible)
        self.context.confirm_commit()
        self._lease.note_replaced(map(known_by, replaced))
        self._lease.check()
        store.replace(metadata_name(rank), *pieces, durable=self.sync_files, overwrite=self.overwrite)
        remove_replaced(store, self._lease, manifest.file_names, replaced, footer=pieces[-1], rank=rank)
        abort_uploads_of(store, self.save_id)

    def _files_of_others(self, manifest: Manifest) -> dict[str, int]:
        """The data files that other ranks have written for this save, with their sizes."""
        if self._own_rank is not None or self._world_size == 1:
            return {}
        mine = set(self._written)
        sizes = zip(manifest.file_names, ints(manifest.file_nbytes, "q"), strict=True)
        return {name: nbytes for name, nbytes in sizes if name not in mine}

    def abandon(self, *, outcome_is_known: bool = True) -> None:
        """After a save that failed: remove what this rank has written for it, and let others in.

        The coordinator removes what other ranks have written, too: a rank that was killed cannot.

        Args:
            outcome_is_known: False where the coordinator may have committed it all the same, or may still
                do so: then nothing is removed.
        """
        try:
            if outcome_is_known:
                self._discard_written()
        finally:
            self._release()

    def _files_in_use(self) -> set[str]:
        """The files of the checkpoint that is there now."""
        return files_named_by(self.store, metadata_name(self._own_rank))

    def _discard_written(self) -> None:
        of_all = files_of_save(self.store, self.save_id) if self._lease else []
        is_clean = discard_files(self.store, [*self._written, *(of_all or ())], self._files_in_use)
        if self._lease is None:
            return
        are_aborted = abort_uploads_of(self.store, self.save_id, self._written)
        # A rank that still writes may be killed before it removes what it makes after this. And what a killed
        # rank has sent may reach the store after this.
        may_come = self.context.others_at_work() or self.store.traits.may_write_late
        if not (is_clean and are_aborted and of_all is not None) or (self._world_size > 1 and may_come):
            self._lease.leave()

    def _release(self) -> None:
        self._written = []
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def how_to_find_metadata(self, metadata: Metadata) -> CommittedMetadata:
        """What other ranks need to find the metadata of this save later, if they want to see it."""
        return CommittedMetadata.of(metadata, self.save_id)

    def metadata_later(self, told: CommittedMetadata) -> Metadata:
        """The metadata of a save that this rank took part in, read from storage when somebody looks at it."""
        return told.as_metadata(self.store, self.checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """The place and the save's own id."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)


def fill_metadata(metadata: Metadata, known: Metadata, names: Sequence[str]) -> None:
    """Set some fields of the metadata that ``finish`` was given; those of older torch lack some."""
    for name in names:
        if hasattr(known, name):
            setattr(metadata, name, getattr(known, name))


def _existing_checkpoint(store: ByteStore, rank: int | None) -> str | None:
    """The name of a file that shows that there is a checkpoint, of any form; None if there is none.

    A rank that writes its own part looks at that part and at joint checkpoints only: the other ranks of the
    same save may have written theirs.
    """
    try:
        store.open(METADATA).close()
    except CheckpointNotFoundError:
        if rank is not None:
            return metadata_name(rank) if store.exists(metadata_name(rank)) else None
        names = store.names() if store.can_list else ()
        return next((name for name in sorted(names) if shows_a_checkpoint(name)), None)
    except AccessDeniedError:
        return (
            None  # stores answer so for what does not exist, if listing is not allowed: the commit will tell
        )
    except StorageError:
        pass  # a link, or the like, in its place
    return METADATA


def _group_size() -> int:
    """How many ranks there are besides the one that writes its own part."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
