"""A load, from top to bottom."""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from holdfast._collector import paused_collector
from holdfast._context import LoadContext
from holdfast._engine.checkpoint_metadata import (
    check_places,
    not_a_first_start,
    place_to_compare,
    read_metadata,
)
from holdfast._engine.per_rank_values import LoadByRank
from holdfast._engine.pickled_tensors import mark_pickled, pickled_shapes
from holdfast._engine.ports import LoadPlannerPort, ReaderPort
from holdfast._engine.rank_view import RankView, view_of_rank, warn_of_shared
from holdfast._engine.tensor_subclasses import LoadParts
from holdfast._engine.timed_exchange import TimedExchange
from holdfast._io.progress import ProgressTracker
from holdfast._objects.decode import decode_object
from holdfast._plan.group_fit import GroupFit, fit_groups, refuse_unfilled
from holdfast._plan.load_coverage import cover
from holdfast._plan.read_columns import plan_of_keys
from holdfast._ranks.exchange import Exchange
from holdfast._transfer_record import RankRecord, TransferRecord
from holdfast._transfer_recorder import TransferRecorder
from holdfast.load_result import LoadResult
from holdfast.metadata import Metadata
from holdfast.planner import LoadPlan, LoadPlanner, ReadItem

_Told: TypeAlias = tuple[Mapping[str, int], GroupFit, str | None]
"""What a rank tells the coordinator: the keys of which every rank gets one value though the ranks that saved
differed; and what it found of its groups of keys."""

ReadObjects: TypeAlias = Callable[[list[str]], dict[str, Any]]
"""Reads objects of the checkpoint ahead of all else, by key. What cannot be read then is left out."""

_Need: TypeAlias = tuple[LoadPlan, _Told]
"""What a rank reads, and what it tells of it."""


@dataclass(frozen=True)
class LoadHooks:
    """Steps that the caller of ``run_load`` adds in the middle of a load.

    Attributes:
        complete: Called on each rank with the metadata, before the planner is set up: adds to the state what
            can only be made when the checkpoint is known.
        check: Called before anything is read, with the flat state, or None if the planner does not say what
            it fills, what will be loaded, and a function that reads small objects ahead. It may raise.
        may_change: Asked after a failure, with the path of a value that was loaded: whether it is the
            caller's own, and not thrown away with the state.
    """

    complete: Callable[[Metadata], None] = lambda _: None
    check: Callable[[Mapping[str, Any] | None, LoadResult, ReadObjects], None] = lambda *_: None
    may_change: Callable[[tuple[Any, ...]], bool] = lambda _: True


def run_load(
    state_dict: dict[str, Any],
    planner: LoadPlannerPort,
    reader: ReaderPort,
    exchange: Exchange,
    *,
    progress: ProgressTracker | None = None,
    hooks: LoadHooks | None = None,
    recorder: TransferRecorder | None = None,
) -> LoadResult:
    """Load into ``state_dict``, in place; called on every rank of the exchange.

    When it returns, on any rank, every rank has all that it asked for. All that can be known from the
    metadata is checked on all ranks before the first byte is read.

    Args:
        state_dict: What to fill, with Stateful objects already replaced by their state.
        planner: Decides what is read.
        reader: Reads it.
        exchange: The ranks that load together.
        progress: Told of the bytes that are read; it may raise to stop the load.
        hooks: What is done in the middle of the load; nothing by default.
        recorder: Measures the load, and can tell afterwards what all ranks have done.

    Returns:
        What was done on this rank.

    Raises:
        CheckpointException: A step failed on some rank; the same on every rank.
    """
    hooks, recorder = hooks or LoadHooks(), recorder or TransferRecorder("load")
    context = LoadContext(
        exchange.rank,
        exchange.world_size,
        exchange.is_coordinator,
        progress or ProgressTracker(),
        may_change=lambda key: hooks.may_change(planner.key_paths().get(key, ())),
    )
    recorder.set_up(exchange.rank, exchange.world_size, context.progress.events)
    timed = TimedExchange(exchange, recorder.clock)
    steps = _LoadSteps(state_dict, planner, reader, timed, context, hooks)
    try:
        return steps.take(recorder)
    except BaseException:
        steps.undo()
        raise


@dataclass
class _LoadSteps:
    """The steps of one load on one rank."""

    _state_dict: dict[str, Any]
    _planner: LoadPlannerPort
    _reader: ReaderPort
    _exchange: Exchange
    _context: LoadContext
    _hooks: LoadHooks
    _by_rank: LoadByRank | None = None
    _parts: LoadParts | None = None
    _metadata: Metadata | None = None
    _result: LoadResult = field(default_factory=LoadResult)

    def take(self, recorder: TransferRecorder) -> LoadResult:
        recorder.clock.enter("read metadata")
        stored, is_shared = read_metadata(self._reader, self._exchange)
        recorder.clock.enter("plan")
        plan, is_changed = _plan(
            lambda: self._need(stored, is_shared=is_shared), self._planner, self._reader, self._exchange
        )
        assert self._metadata is not None
        if is_changed:
            self._result = cover(plan, self._planner.flat_state(), self._metadata)
        recorder.clock.enter("read")
        read = not_a_first_start(self._reading(plan))

        def read_and_measure() -> RankRecord:
            read()
            recorder.clock.count(self._context.progress.nbytes_done)
            return recorder.mine()

        def join(rows: list[RankRecord]) -> tuple[TransferRecord, float]:
            recorder.gather(rows)
            return recorder.to_tell()

        told = self._exchange.agree("read", read_and_measure, join)
        if not self._exchange.is_coordinator:
            recorder.learn(told)
        return replace(self._result, user_metadata=stored.user_metadata or {})

    @paused_collector()
    def _need(self, stored: Metadata, *, is_shared: bool) -> _Need:
        planner, reader, exchange = self._planner, self._reader, self._exchange
        rank, world_size = exchange.rank, exchange.group_size
        shapes = pickled_shapes(stored) if planner.flattens else {}
        view = view_of_rank(stored, rank=rank, world_size=world_size, state=self._state_dict)
        self._hooks.complete(mark_pickled(view.mark_own(), shapes))
        if view.own_shapes:
            # Of room that is sharded, no rank may fill its part from a value of its own.
            view = view_of_rank(stored, rank=rank, world_size=world_size, state=self._state_dict)
        metadata, storage = view.metadata, view.stored
        self._by_rank = LoadByRank(self._state_dict, planner, metadata, rank=rank, world_size=world_size)
        state = self._by_rank.state
        if planner.flattens:
            self._parts = LoadParts(state, planner, metadata, shapes)
            state = self._parts.state
            if storage is metadata:
                storage = self._parts.metadata
            metadata = self._parts.metadata
        self._metadata = metadata
        planner.plugin.set_up_planner(state, metadata, exchange.is_coordinator)
        reader.set_up(storage, self._context, use_collectives=is_shared)
        plan = planner.plugin.create_local_plan()
        result = self._result = cover(plan, planner.flat_state(), metadata)
        self._hooks.check(planner.flat_state(), result, lambda keys: _objects_ahead(keys, plan, view, reader))
        if self._parts is not None:
            self._parts.pickled.check(
                lambda keys, take: _read_ahead(keys, plan, view, reader, take), planner.decode
            )
        fit = _fit(self._by_rank.state, planner, result, metadata, is_alone=exchange.world_size == 1)
        place = place_to_compare(stored, reader.place) if is_shared else None
        return reader.plugin.prepare_local_plan(view.translate(plan)), (view.shared_by(plan), fit, place)

    def _reading(self, plan: LoadPlan) -> Callable[[], None]:
        """The function that reads. What ranks must do together to prepare that is done when this returns."""
        planner, reader, exchange = self._planner, self._reader, self._exchange
        read_together: Callable[[], None] | None = None
        if exchange.world_size > 1 and reader.read_together is not None:
            read_together = reader.read_together(
                lambda: planner.plugin.finish_plan(plan), planner.plugin, exchange
            )

        def work() -> None:
            if read_together is not None:
                read_together()
            else:
                reader.read(planner.plugin.finish_plan(plan), planner)
            self._context.progress.end()
            if self._parts is not None:
                self._parts.finish()
            assert self._by_rank is not None
            self._by_rank.finish()

        return work

    def undo(self) -> None:
        """After a failure: put back what the load has put into the state for itself."""
        if self._by_rank is not None:
            self._by_rank.undo()


def _plan(
    need: Callable[[], _Need], planner: LoadPlannerPort, reader: ReaderPort, exchange: Exchange
) -> tuple[LoadPlan, bool]:
    """Agree on the plans of all ranks.

    Returns:
        This rank's plan, and whether planner or reader may have changed it.
    """

    @paused_collector()
    def compare(ranks: list[_Told]) -> None:
        check_places([place for _, _, place in ranks])
        refuse_unfilled([fit for _, fit, _ in ranks])
        warn_of_shared([common for common, _, _ in ranks], exchange.group_size)

    if planner.passes_plans_on and reader.passes_plans_on:
        mine: list[LoadPlan] = []

        def keep_plan() -> _Told:
            plan, told = need()
            mine.append(plan)
            return told

        exchange.agree("plan", keep_plan, compare)
        return mine[0], False

    @paused_collector()
    def merge(needs: list[_Need]) -> list[LoadPlan]:
        compare([told for _, told in needs])
        plans = planner.plugin.create_global_plan([plan for plan, _ in needs])
        return reader.plugin.prepare_global_plan(plans)

    return exchange.decide("plan", need, merge), True


class _ObjectsAhead(LoadPlanner):
    """Hands on what is read ahead."""

    def __init__(self, take: Callable[[str, io.BytesIO], None]) -> None:
        self.take = take

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.take(read_item.dest_index.fqn, value)


def _read_ahead(
    keys: list[str],
    plan: LoadPlan,
    view: RankView,
    reader: ReaderPort,
    take: Callable[[str, io.BytesIO], None],
) -> None:
    """Hand on the objects that a plan loads under some keys; nothing if the storage cannot read twice."""
    if reader.read_ahead is not None:
        reader.read_ahead(view.translate(plan_of_keys(plan, set(keys))), _ObjectsAhead(take))


def _objects_ahead(keys: list[str], plan: LoadPlan, view: RankView, reader: ReaderPort) -> dict[str, Any]:
    """The values of these objects."""
    found: dict[str, Any] = {}

    def take(key: str, stream: io.BytesIO) -> None:
        found[key] = decode_object(key, stream)

    _read_ahead(keys, plan, view, reader, take)
    return found


def _fit(
    state_dict: dict[str, Any],
    planner: LoadPlannerPort,
    result: LoadResult,
    metadata: Metadata,
    *,
    is_alone: bool,
) -> GroupFit:
    """Which groups of keys this rank fills; the coordinator compares them over all ranks."""
    state = planner.flat_state()
    stored = metadata.state_dict_metadata
    if state is None or not stored:
        return GroupFit()
    if not state and not result.loaded:
        # A module without parameters has nothing to fill. If the checkpoint has something there, it is amiss.
        roots = {str(root) for root in state_dict}
        return GroupFit(asks=bool(roots) and not any(key.partition(".")[0] in roots for key in stored))
    may_leave_out = planner.allows_partial or planner.ignores_shapes
    if not may_leave_out or (is_alone and not result.left_alone):
        return GroupFit()
    return fit_groups(result, planner.key_paths(), stored.keys())
