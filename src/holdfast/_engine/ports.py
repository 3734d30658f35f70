"""Ports: planners and storages as the engine calls them, with every method, whoever wrote the plugin.

``adapt.py`` makes a port of each plugin. A port of a storage takes the place of its plugin only towards the
engine: planners and storages are handed each other's plugins, never each other's ports.
"""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast._context import LoadContext, SaveContext
from holdfast._ranks.exchange import Exchange
from holdfast._torch_compat.torch_records import to_ours
from holdfast.metadata import Metadata
from holdfast.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from holdfast.storage import StorageReader, StorageWriter, WriteResult

Fingerprints = Mapping[tuple[int, ...] | None, Mapping[str, bytes]]
"""For each set of ranks that must hold the same (None for all ranks) the fingerprint of each value."""


@dataclass(frozen=True)
class SavePlannerPort:
    """A save planner.

    Attributes:
        plugin: The planner, as storages get it; the engine calls the methods of its plans.
        set_up: Gives the planner the state of this rank: ``set_up_planner`` with the keywords that it knows.
        flattens: Whether it gives each value of a nested state a key of its own.
        fingerprints: Returns the fingerprints of values that other ranks hold too; empty if the planner
            does not make any. Called after ``create_local_plan``.
        keep_for_rank: Takes keys of this rank with other names, saves their values under these, and returns
            for each key why it cannot; see ``DefaultSavePlanner.keep_for_rank``.
    """

    plugin: SavePlanner
    set_up: Callable[..., None]
    flattens: bool
    fingerprints: Callable[[], Fingerprints]
    keep_for_rank: Callable[[Mapping[str, str]], dict[str, str]]

    def finish_plan(self, plan: SavePlan) -> SavePlan:
        """This rank's final plan, with the storage's own notes of this save: a cached plan has old ones."""
        return replace(self.plugin.finish_plan(plan), storage_data=plan.storage_data)


@dataclass(frozen=True)
class LoadPlannerPort:
    """A load planner.

    Attributes:
        plugin: The planner, as storages get it; the engine calls its methods.
        flattens: Whether it gives each value of a nested state a key of its own.
        cast: Whether dtypes may differ, as ``DefaultLoadPlanner`` says; None if the planner does not say.
        passes_plans_on: Whether ``create_global_plan`` returns the plans as they are.
        flat_state: Returns the flat state that the planner fills, or None if it does not say. Called after
            ``create_local_plan``.
        key_paths: Returns the paths of the keys of the flat state, as far as they are known.
        allows_partial: Whether it was told to leave alone keys that the checkpoint does not have.
        ignores_shapes: Whether it was told to leave alone tensors of another shape.
        decode: Makes an object of what a storage reads under a key, allowing what the planner allows.
    """

    plugin: LoadPlanner
    flattens: bool
    cast: bool | None
    passes_plans_on: bool
    flat_state: Callable[[], Mapping[str, Any] | None]
    key_paths: Callable[[], Mapping[str, Any]]
    allows_partial: bool
    ignores_shapes: bool
    decode: Callable[[str, io.BytesIO], Any]


@dataclass
class WriterPort:
    """A storage writer. Its methods are called in the order in which they stand here.

    Attributes:
        plugin: The storage writer itself; the engine calls its methods that prepare plans.
        set_up_writer: ``set_up_storage_writer`` with the keywords that it knows; see :meth:`set_up`.
        expect_files: Takes a plan, and notes the files that ``write`` will make for it, in case a process
            other than this one makes them.
        summary_of: On the coordinator: what the other ranks are told of the committed checkpoint, given its
            metadata: that itself, or less if the writer can find the metadata again.
        abandon_save: Called by :meth:`abandon`.
        place: Where it writes to, if all ranks must write to the same place; None if that is not known.
        needs_other_ranks: Takes a plan, and tells whether ``write`` exchanges bytes with other ranks for it:
            then no other process can do it.
    """

    plugin: StorageWriter
    set_up_writer: Callable[..., None]
    expect_files: Callable[[SavePlan], None]
    summary_of: Callable[[Metadata], Any]
    abandon_save: Callable[..., None]
    place: str | None = None
    needs_other_ranks: Callable[[SavePlan], bool] = lambda plan: False  # noqa: ARG005

    def set_up(self, context: SaveContext) -> None:
        """Tell the writer of the save that begins."""
        self.set_up_writer(
            context.is_coordinator,
            rank=context.rank,
            use_collectives=context.use_collectives,
            context=context,
        )

    def write(self, plan: SavePlan, planner: SavePlannerPort) -> list[WriteResult]:
        """Write what the plan says, and return when it is on stable storage."""
        writing = self.plugin.write_data(plan, planner.plugin)
        # Some futures return nothing from wait.
        writing.wait()
        return writing.value()

    def commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: make the checkpoint exist."""
        self.plugin.finish(metadata, results)

    def metadata_of(self, summary: Any) -> Metadata:
        """On the other ranks: the metadata that ``summary_of`` stands for."""
        if isinstance(summary, Metadata):
            return summary
        finds_it: Any = self.plugin
        metadata: Metadata = finds_it.metadata_later(summary)
        return metadata

    def abandon(self, *, outcome_is_known: bool) -> None:
        """After a save that failed: remove what was written for it, if it is known not to be committed."""
        self.abandon_save(outcome_is_known=outcome_is_known)


@dataclass(frozen=True)
class ReaderPort:
    """A storage reader.

    Attributes:
        plugin: The storage reader itself; the engine calls its methods that prepare plans.
        set_up_reader: ``set_up_storage_reader`` with the keywords that it knows; see :meth:`set_up`.
        metadata_is_alike: Whether ``read_metadata`` returns the same on every rank and does nothing else.
        has_rank_metadata: Whether it can read what ranks wrote each for itself.
        passes_plans_on: Whether ``prepare_global_plan`` returns the plans as they are.
        read_together: As ``read``, on all ranks of an exchange: what several ranks need is read once. Takes
            the function that gives this rank's final plan, the planner's plugin and the exchange, and returns
            the function that reads, to be called on every rank. None if the reader cannot do that.
        read_ahead: Reads a few small objects before the load begins, and hands them to the planner that it
            gets with the plan. None if the reader cannot read twice in one load.
        place: Where it reads from; None if that is not known.
    """

    plugin: StorageReader
    set_up_reader: Callable[..., None]
    metadata_is_alike: bool
    has_rank_metadata: bool
    passes_plans_on: bool
    read_together: Callable[[Callable[[], LoadPlan], LoadPlanner, Exchange], Callable[[], None]] | None
    read_ahead: Callable[[LoadPlan, LoadPlanner], None] | None
    place: str | None = None

    def read_metadata(self) -> Metadata:
        """The metadata that all ranks share. Raises FileNotFoundError if there is none."""
        # A reader of our kind may have unpickled what it wrote when it was one of torch's.
        metadata: Metadata = to_ours(self.plugin.read_metadata())
        return metadata

    def read_rank_metadata(self, rank: int, world_size: int) -> Metadata:
        """The metadata of parts that ranks saved each for itself, as this rank may load them."""
        metadata: Metadata = to_ours(self.plugin.read_metadata(rank=rank, world_size=world_size))
        return metadata

    def set_up(self, metadata: Metadata, context: LoadContext, *, use_collectives: bool) -> None:
        """Tell the reader of the load that begins."""
        self.set_up_reader(
            metadata,
            context.is_coordinator,
            rank=context.rank,
            use_collectives=use_collectives,
            context=context,
        )

    def read(self, plan: LoadPlan, planner: LoadPlannerPort) -> None:
        """Read what the plan says, and hand it to the planner."""
        self.plugin.read_data(plan, planner.plugin).wait()
