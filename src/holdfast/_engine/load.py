"""A load, from top to bottom."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from holdfast._context import LoadContext
from holdfast._engine.per_rank_values import LoadByRank
from holdfast._engine.ports import LoadPlannerPort, ReaderPort
from holdfast._engine.rank_view import view_of_rank, warn_of_shared
from holdfast._io.progress import ProgressTracker
from holdfast._ranks.exchange import Exchange
from holdfast.errors import CheckpointNotFoundError
from holdfast.metadata import Metadata
from holdfast.planner import LoadPlan

_Need: TypeAlias = tuple[LoadPlan, Mapping[str, int]]
"""What a rank reads; and of it what every rank gets alike though the ranks that saved differed."""


def run_load(
    state_dict: dict[str, Any],
    planner: LoadPlannerPort,
    reader: ReaderPort,
    exchange: Exchange,
    *,
    progress: ProgressTracker | None = None,
    complete: Callable[[Metadata], None] = lambda _: None,
) -> None:
    """Load into ``state_dict``, in place; called on every rank of the exchange.

    When it returns, on any rank, every rank has all that it asked for. All that can be known from the
    metadata is checked on all ranks before the first byte is read.

    Args:
        state_dict: What to fill, with Stateful objects already replaced by their state.
        planner: Decides what is read.
        reader: Reads it.
        exchange: The ranks that load together.
        progress: Told of the bytes that are read; it may raise to stop the load.
        complete: Called on each rank with the metadata, before the planner is set up: adds to ``state_dict``
            what can only be made when the checkpoint is known.

    Raises:
        CheckpointException: A step failed on some rank; the same on every rank.
    """
    context = LoadContext(
        exchange.rank, exchange.world_size, exchange.is_coordinator, progress or ProgressTracker()
    )
    shared = _read_shared_metadata(reader, exchange)
    by_rank: LoadByRank | None = None

    def need() -> _Need:
        nonlocal by_rank
        rank, world_size = exchange.rank, exchange.group_size
        metadata = shared or _read_rank_metadata(reader, exchange)
        complete(metadata)
        view = view_of_rank(metadata, rank=rank, world_size=world_size, state=state_dict)
        by_rank = LoadByRank(state_dict, planner, view.metadata, rank=rank, world_size=world_size)
        planner.plugin.set_up_planner(by_rank.state, view.metadata, exchange.is_coordinator)
        reader.set_up(view.stored, context, use_collectives=shared is not None)
        plan = planner.plugin.create_local_plan()
        return reader.plugin.prepare_local_plan(view.translate(plan)), view.shared_by(plan)

    plan = _plan(need, planner, reader, exchange)

    read_together: Callable[[], None] | None = None
    if exchange.world_size > 1 and reader.read_together is not None:
        read_together = reader.read_together(
            lambda: planner.plugin.finish_plan(plan), planner.plugin, exchange
        )

    def read() -> None:
        if read_together is not None:
            read_together()
        else:
            reader.read(planner.plugin.finish_plan(plan), planner)
        context.progress.end()
        assert by_rank is not None
        by_rank.finish()

    exchange.agree("read", read, lambda _: None)


def _plan(
    need: Callable[[], _Need], planner: LoadPlannerPort, reader: ReaderPort, exchange: Exchange
) -> LoadPlan:
    """What this rank reads, once all ranks know what they need."""
    if planner.passes_plans_on and reader.passes_plans_on:
        mine: list[LoadPlan] = []

        def keep_plan() -> Mapping[str, int]:
            plan, common = need()
            mine.append(plan)
            return common

        exchange.agree("plan", keep_plan, lambda ranks: warn_of_shared(ranks, exchange.group_size))
        return mine[0]

    def merge(needs: list[_Need]) -> list[LoadPlan]:
        plans = planner.plugin.create_global_plan([plan for plan, _ in needs])
        warn_of_shared([common for _, common in needs], exchange.group_size)
        return reader.plugin.prepare_global_plan(plans)

    return exchange.decide("plan", need, merge)


def _read_shared_metadata(reader: ReaderPort, exchange: Exchange) -> Metadata | None:
    """The metadata that all ranks share; None where there are only ranks' own parts.

    Metadata that is there and cannot be read is an error: whatever else is in that place is older.
    """

    def read() -> Metadata | None:
        try:
            return reader.read_metadata()
        except FileNotFoundError:
            if not reader.has_rank_metadata:
                raise
            return None

    if reader.metadata_is_alike:
        return exchange.share("read metadata", read)
    # A reader that we do not know may do more than read.
    own: list[Metadata | None] = []
    found = exchange.agree("read metadata", lambda: own.append(read()), lambda _: None)
    assert found is None
    return own[0]


def _read_rank_metadata(reader: ReaderPort, exchange: Exchange) -> Metadata:
    """What ranks wrote each for itself, as this rank may load it."""
    try:
        return reader.read_rank_metadata(exchange.rank, exchange.world_size)
    except CheckpointNotFoundError:
        raise
    except FileNotFoundError:
        # A stranger's reader has neither form, and knows best what is missing of the usual one.
        return reader.read_metadata()
