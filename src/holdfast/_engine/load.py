"""A load, from top to bottom."""

import inspect
from typing import Any

from holdfast._ranks.exchange import Exchange
from holdfast.metadata import Metadata
from holdfast.planner import LoadPlan, LoadPlanner
from holdfast.storage import StorageReader

__all__ = ["run_load"]


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
        metadata, is_shared = _read_metadata(reader, exchange.rank)
        planner.set_up_planner(state_dict, metadata, exchange.is_coordinator)
        _set_up(reader, metadata, exchange, is_shared)
        return reader.prepare_local_plan(planner.create_local_plan())

    def look_at_all(needs: list[LoadPlan]) -> list[LoadPlan]:
        return reader.prepare_global_plan(planner.create_global_plan(needs))

    plan = exchange.decide("plan", need, look_at_all)

    def read() -> None:
        reader.read_data(planner.finish_plan(plan), planner).wait()

    exchange.agree("read", read, lambda _: None)


def _read_metadata(reader: StorageReader, rank: int) -> tuple[Metadata, bool]:
    """The metadata that all ranks share or, where there is none at all, that of this rank's own part.

    Metadata that is there and cannot be read is an error: whatever else is in that place is older.
    """
    try:
        return reader.read_metadata(), True
    except FileNotFoundError as absent:
        if "kwargs" not in inspect.signature(reader.read_metadata).parameters:
            raise
        try:
            return reader.read_metadata(rank=rank), False
        except FileNotFoundError:
            raise absent from None


def _set_up(reader: StorageReader, metadata: Metadata, exchange: Exchange, is_shared: bool) -> None:
    # Readers from before these keyword arguments existed do not take them.
    if "kwargs" in inspect.signature(reader.set_up_storage_reader).parameters:
        reader.set_up_storage_reader(
            metadata, exchange.is_coordinator, rank=exchange.rank, use_collectives=is_shared
        )
    else:
        reader.set_up_storage_reader(metadata, exchange.is_coordinator)
