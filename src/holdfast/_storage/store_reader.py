"""Owns the storage reader over any store: metadata, and the ranges that a plan asks for."""

import os
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from torch.futures import Future
from typing_extensions import Self

from holdfast._context import LoadContext
from holdfast._io.progress import ProgressTracker
from holdfast._io.store import FileSource
from holdfast._known_methods import known_to_engine
from holdfast._ranks.exchange import Exchange
from holdfast._storage.read_requests import nbytes_to_read
from holdfast._storage.reading import read_items, read_metadata_file, read_own_parts
from holdfast._storage.shared_reads import read_together
from holdfast._storage.store_place import AtStore, new_id
from holdfast._storage.store_writer import DEFAULT_BUDGET
from holdfast._torch_compat.torch_plugins import our_load_planner
from holdfast._torch_compat.torch_records import called_by_torch, to_ours, to_torch
from holdfast.errors import UsageError
from holdfast.extension import ExtensionRegistry
from holdfast.metadata import Metadata, StorageMeta
from holdfast.planner import LoadPlan, LoadPlanner
from holdfast.storage import StorageReader


@dataclass(eq=False, repr=False)
class StoreReader(AtStore[FileSource], StorageReader):
    """Reads a checkpoint from a store: what ``FileSystemReader`` promises, with its arguments.

    Args:
        _store: The place; None for a subclass that has its own property ``store``.
        registry: What is ``_extension_registry`` there.
        thread_count: As there; by default as many as suit the store.

    Attributes:
        context: The load that is being served.
    """

    _store: Any
    _: KW_ONLY
    registry: ExtensionRegistry = field(default_factory=ExtensionRegistry)
    thread_count: int | None = None
    memory_budget: int = DEFAULT_BUDGET
    verify: bool = True
    allow_pickle: bool = False
    share_reads: bool = True
    load_id: str = field(init=False, default_factory=new_id)
    storage_data: dict[Any, Any] = field(init=False, default_factory=dict)
    rank: int | None = field(init=False, default=None)
    use_collectives: bool = field(init=False, default=True)
    context: LoadContext = field(init=False, default_factory=LoadContext)
    _metadata: Metadata | None = field(init=False, default=None)
    _is_for_torch: bool = field(init=False, default=False)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, from another place if one is named."""
        if checkpoint_id:
            self._move_to(checkpoint_id)
        self.load_id = new_id()
        self.storage_data = {}
        self._metadata = None

    @known_to_engine
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """The checkpoint's metadata; with ``rank``, as that rank sees what ranks wrote each for itself."""
        store, rank = self.store, kwargs.get("rank")
        if rank is None:
            metadata = read_metadata_file(store, allow_pickle=self.allow_pickle)
        else:
            metadata = read_own_parts(
                store, rank=rank, world_size=kwargs.get("world_size"), allow_pickle=self.allow_pickle
            )
        return self._as_asked_for(metadata)

    def _as_asked_for(self, metadata: Metadata) -> Metadata:
        """Metadata with the id of this load, as torch's records if torch asks for it."""
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        if self._is_for_torch or called_by_torch(self):
            theirs: Metadata = to_torch(metadata)
            return theirs
        return metadata

    def for_torch(self) -> Self:
        """Make ``read_metadata`` return torch's records, and return this reader.

        ``torch.distributed.checkpoint.load(state, storage_reader=FileSystemReader(path).for_torch())`` then
        works however torch calls it. Without this, the reader looks at who calls it: that is enough for the
        functions of torch's package, but not for a program that wraps the reader.
        """
        self._is_for_torch = True
        return self

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,
        *args: Any,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """Keep the metadata, and the context of the load."""
        self._metadata = to_ours(metadata)
        self.storage_data = self._metadata.storage_data
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)
        self.context = kwargs.get("context") or LoadContext(is_coordinator=is_coordinator)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    @known_to_engine
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    @known_to_engine
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Read what the plan asks for, and hand it to the planner."""
        plan = self._announce(to_ours(plan))
        self._read(self.store, plan, our_load_planner(planner), self.context.progress)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _announce(self, plan: LoadPlan) -> LoadPlan:
        """Tell the progress tracker how much the plan reads, if anybody wants to know."""
        if self._metadata is not None and self.context.progress.is_watched:
            self.context.progress.begin(nbytes_to_read(plan, self._metadata))
        return plan

    def read_ahead(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """As ``read_data``, for a few objects that must be known before the load begins."""
        self._read(self.store, plan, planner, ProgressTracker(), may_change=lambda _: False)

    def _read(
        self,
        store: FileSource,
        plan: LoadPlan,
        planner: LoadPlanner,
        progress: ProgressTracker,
        threads: int | None = None,
        may_change: Callable[[str], bool] | None = None,
    ) -> None:
        if self._metadata is None:
            raise UsageError("set_up_storage_reader must be called before read_data")
        read_items(
            store,
            plan,
            planner,
            self._metadata,
            registry=self.registry,
            threads=threads or self.thread_count or store.traits.requests_in_flight,
            budget=self.memory_budget,
            verify=self.verify,
            progress=progress,
            may_change=may_change or self.context.may_change,
        )

    def read_data_together(
        self, finish_plan: Callable[[], LoadPlan], planner: LoadPlanner, exchange: Exchange
    ) -> Callable[[], None]:
        """As ``read_data``, on all ranks of an exchange: what several of them need is read once.

        Returns:
            The function that reads, to be called on every rank.
        """
        assert self._metadata is not None
        return read_together(
            self.store,
            lambda: self._announce(finish_plan()),
            planner,
            self._metadata,
            exchange,
            lambda store, part, threads: self._read(store, part, planner, self.context.progress, threads),
            willing=self.share_reads,
        )
