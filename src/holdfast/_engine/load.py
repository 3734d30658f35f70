"""A load, from top to bottom."""

import inspect
from typing import Any

from holdfast._engine.collector import paused_collector
from holdfast._ranks.exchange import Exchange
from holdfast.metadata import Metadata
from holdfast.planner import LoadPlan, LoadPlanner
from holdfast.storage import StorageReader

__all__ = ["run_load"]


@paused_collector()
def run_load(
    state_dict: dict[str, Any], planner: LoadPlanner, reader: StorageReader, exchange: Exchange
) -> None:
    """Load into ``state_dict``, in place; called on every rank of the exchange.

    When it returns, on any rank, every rank has all that it asked for. All that can be known from the
    metadata is checked on all ranks before the first byte is read.

    Raises:
        CheckpointException: A step failed on some rank; the same on every rank.
    """

    def need() -> LoadPlan:
        metadata = reader.read_metadata()
        planner.set_up_planner(state_dict, metadata, exchange.is_coordinator)
        _set_up(reader, metadata, exchange)
        return reader.prepare_local_plan(planner.create_local_plan())

    def look_at_all(needs: list[LoadPlan]) -> list[LoadPlan]:
        return reader.prepare_global_plan(planner.create_global_plan(needs))

    plan = exchange.decide("plan", need, look_at_all)

    def read() -> None:
        reader.read_data(planner.finish_plan(plan), planner).wait()

    exchange.agree("read", read, lambda _: None)


def _set_up(reader: StorageReader, metadata: Metadata, exchange: Exchange) -> None:
    # Readers from before these keyword arguments existed do not take them.
    if "kwargs" in inspect.signature(reader.set_up_storage_reader).parameters:
        reader.set_up_storage_reader(
            metadata, exchange.is_coordinator, rank=exchange.rank, use_collectives=True
        )
    else:
        reader.set_up_storage_reader(metadata, exchange.is_coordinator)
