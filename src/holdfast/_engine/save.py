"""A save, from top to bottom."""

from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import Any

from holdfast._collector import paused_collector
from holdfast._context import SaveContext
from holdfast._engine.per_rank_values import split_by_rank
from holdfast._engine.ports import SavePlannerPort, WriterPort
from holdfast._engine.replica_check import Holders, Replicas, differ
from holdfast._engine.result_check import check_counts, check_results
from holdfast._engine.tensor_subclasses import open_subclasses
from holdfast._io.progress import ProgressTracker
from holdfast._plan.write_columns import columns_of
from holdfast._ranks.exchange import Exchange
from holdfast.errors import UsageError
from holdfast.metadata import Metadata
from holdfast.planner import SavePlan
from holdfast.storage import WriteResult

# Metadata of more items than this is not sent to every rank: few ranks ever look at it.
_MOST_SENT = 20_000


class SaveCancellation:
    """Whether a save may go on; subclasses know."""

    def check(self) -> None:
        """Raise if the save was cancelled."""

    def close(self) -> None:
        """Make it impossible to cancel; raise if the save was cancelled before."""


def run_save(
    state_dict: dict[str, Any],
    planner: SavePlannerPort,
    writer: WriterPort,
    exchange: Exchange,
    *,
    use_collectives: bool = True,
    progress: ProgressTracker | None = None,
    cancellation: SaveCancellation | None = None,
) -> Metadata:
    """Save ``state_dict``; called on every rank of the exchange.

    When it returns, on any rank, every planned item of every rank is on stable storage and the checkpoint
    is committed. When it raises, nothing was committed.

    Args:
        state_dict: What to save, with Stateful objects already replaced by their state.
        planner: Decides what is written.
        writer: Writes it.
        exchange: The ranks that save together.
        use_collectives: False if each rank writes a checkpoint of its own part.
        progress: Told of the bytes that are written; it may raise to stop the save.
        cancellation: Asked before each step whether to go on; by default nobody can cancel.

    Raises:
        CheckpointException: A step failed on some rank; the same on every rank.
    """
    context = SaveContext(
        rank=exchange.rank,
        world_size=exchange.world_size,
        is_coordinator=exchange.is_coordinator,
        use_collectives=use_collectives,
        progress=progress or ProgressTracker(),
        confirm_commit=exchange.confirm,
    )
    try:
        return _run(state_dict, planner, writer, exchange, context, cancellation or SaveCancellation())
    except BaseException:
        writer.abandon(outcome_is_known=exchange.outcome_is_known)
        raise


def _run(
    state_dict: dict[str, Any],
    planner: SavePlannerPort,
    writer: WriterPort,
    exchange: Exchange,
    context: SaveContext,
    cancellation: SaveCancellation,
) -> Metadata:
    metadata = None
    offered: list[SavePlan] = []
    planned: list[SavePlan] = []
    replicas = Replicas(planner, exchange)

    @paused_collector()
    def make_local_plan() -> SavePlan:
        plan = planner.plugin.create_local_plan()
        cancellation.check()
        return writer.plugin.prepare_local_plan(plan)

    @paused_collector()
    def make_global_plan(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata, planned
        plans, metadata = planner.plugin.create_global_plan(plans)
        cancellation.check()
        planned = writer.plugin.prepare_global_plan(plans)
        return planned

    @paused_collector()
    def offer() -> tuple[SavePlan, dict[Holders, bytes], str | None]:
        state = split_by_rank(state_dict, planner, rank=exchange.rank, world_size=exchange.group_size)
        planner.set_up(
            state_dict=open_subclasses(state) if planner.flattens else state,
            storage_meta=writer.plugin.storage_meta(),
            is_coordinator=exchange.is_coordinator,
        )
        cancellation.check()
        writer.set_up(context)
        return make_local_plan(), replicas.together(), writer.place

    def merge(offers: list[tuple[SavePlan, dict[Holders, bytes], str | None]]) -> Sequence[SavePlan | None]:
        _check_places([place for _, _, place in offers])
        offered.extend(plan for plan, _, _ in offers)
        if differ(marks for _, marks, _ in offers):
            return [None] * len(offers)
        return make_global_plan(offered)

    plan = exchange.decide("plan", offer, merge)
    if plan is None:
        plan = replicas.settle(offered, make_local_plan, make_global_plan)

    def write() -> list[WriteResult]:
        final = planner.finish_plan(plan)
        if context.progress.is_watched:
            context.progress.begin(sum(columns_of(final).item_nbytes()))
        cancellation.check()
        try:
            results = writer.write(final, planner)
        except CancelledError:
            cancellation.check()
            raise
        if not exchange.is_coordinator:
            # The coordinator may commit as soon as it is told of the results.
            cancellation.close()
        context.progress.end()
        check_results(final, results, rank=exchange.rank)
        return results

    def commit(written: list[list[WriteResult]]) -> list[Any]:
        assert metadata is not None
        check_counts(planned, written)
        cancellation.close()
        writer.commit(metadata, written)
        is_large = len(metadata.storage_data or ()) > _MOST_SENT
        told = writer.summary_of(metadata) if is_large else metadata
        return [metadata if rank == exchange.rank else told for rank in range(exchange.world_size)]

    return writer.metadata_of(exchange.decide("write", write, commit))


def _check_places(places: Sequence[str | None]) -> None:
    """Raise if ranks write to different places: no place would have the whole checkpoint."""
    for rank, place in enumerate(places):
        if place != places[0]:
            raise UsageError(
                f"all ranks must save to the same place, but rank 0 saves to {places[0]} and rank {rank} to "
                f"{place}. Make the name on one rank and broadcast it; leave rank and time out of it.",
                rank=rank,
                expected=places[0],
                found=place,
            )
