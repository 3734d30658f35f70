"""A save, from top to bottom."""

import inspect
from typing import Any

from holdfast._engine.account import check_counts, check_results
from holdfast._engine.per_rank import split_by_rank
from holdfast._engine.replicas import Holders, Replicas, differ
from holdfast._ranks.exchange import Exchange
from holdfast.metadata import Metadata
from holdfast.planner import SavePlan, SavePlanner
from holdfast.storage import StorageWriter, WriteResult

__all__ = ["run_save"]


def run_save(
    state_dict: dict[str, Any],
    planner: SavePlanner,
    writer: StorageWriter,
    exchange: Exchange,
    *,
    use_collectives: bool = True,
) -> Metadata:
    """Save ``state_dict``; called on every rank of the exchange.

    When it returns, on any rank, every planned item of every rank is on stable storage and the checkpoint
    is committed. When it raises, nothing was committed.

    Raises:
        CheckpointException: A step failed on some rank; the same on every rank.
    """
    try:
        return _run(state_dict, planner, writer, exchange, use_collectives=use_collectives)
    except BaseException:
        abandon = getattr(writer, "abandon", None)
        if abandon is not None:
            abandon(outcome_is_known=exchange.outcome_is_known)
        raise


def _run(
    state_dict: dict[str, Any],
    planner: SavePlanner,
    writer: StorageWriter,
    exchange: Exchange,
    *,
    use_collectives: bool,
) -> Metadata:
    metadata = None
    planned: list[SavePlan] = []
    replicas = Replicas(planner, exchange)

    def offer() -> tuple[SavePlan, dict[Holders, bytes]]:
        planner.set_up_planner(
            state_dict=split_by_rank(state_dict, planner, rank=exchange.rank, world_size=exchange.group_size),
            storage_meta=writer.storage_meta(),
            is_coordinator=exchange.is_coordinator,
        )
        _set_up(writer, exchange, use_collectives)
        return writer.prepare_local_plan(planner.create_local_plan()), replicas.together()

    def merge(offers: list[tuple[SavePlan, dict[Holders, bytes]]]) -> list[tuple[SavePlan, bool]]:
        nonlocal metadata, planned
        plans, metadata = planner.create_global_plan([plan for plan, _ in offers])
        planned = writer.prepare_global_plan(plans)
        values_differ = differ(marks for _, marks in offers)
        return [(plan, values_differ) for plan in planned]

    plan, values_differ = exchange.decide("plan", offer, merge)
    if values_differ:
        replicas.compare()

    def write() -> list[WriteResult]:
        final = planner.finish_plan(plan)
        results = writer.write_data(final, planner).wait()
        check_results(final, results, rank=exchange.rank)
        return results

    def commit(written: list[list[WriteResult]]) -> list[Any]:
        assert metadata is not None
        check_counts(planned, written)
        writer.finish(metadata, written)
        told = _for_others(writer, metadata)
        return [metadata if rank == exchange.rank else told for rank in range(exchange.world_size)]

    made = exchange.decide("write", write, commit)
    return made if isinstance(made, Metadata) else writer.metadata_later(made)  # type: ignore[attr-defined]


# What more items than this have in common is not sent to every rank: few ever look at it.
_MOST_SENT = 20_000


def _for_others(writer: StorageWriter, metadata: Metadata) -> Any:
    """What the other ranks are told of the checkpoint: its metadata, or how to find it if it is large."""
    tell = getattr(writer, "how_to_find_metadata", None)
    if tell is None or len(metadata.storage_data or ()) <= _MOST_SENT:
        return metadata
    return tell(metadata)


def _set_up(writer: StorageWriter, exchange: Exchange, use_collectives: bool) -> None:
    # Writers from before these keyword arguments existed do not take them.
    if "kwargs" in inspect.signature(writer.set_up_storage_writer).parameters:
        writer.set_up_storage_writer(
            exchange.is_coordinator, rank=exchange.rank, use_collectives=use_collectives
        )
    else:
        writer.set_up_storage_writer(exchange.is_coordinator)
