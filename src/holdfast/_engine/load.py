"""A load, from top to bottom."""

import inspect
from collections.abc import Callable
from typing import Any

from holdfast._engine.per_rank import LoadByRank
from holdfast._foreign import to_ours
from holdfast._ranks.exchange import Exchange
from holdfast._shortcuts import can_read_together, is_alike_everywhere, leaves_plans_alone
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
    shared = _read_shared_metadata(reader, exchange)

    by_rank: LoadByRank | None = None

    def need() -> LoadPlan:
        nonlocal by_rank
        metadata = shared or _read_own_metadata(reader, exchange)
        by_rank = LoadByRank(
            state_dict, planner, metadata, rank=exchange.rank, world_size=exchange.group_size
        )
        planner.set_up_planner(by_rank.state, metadata, exchange.is_coordinator)
        _set_up(reader, metadata, exchange, is_shared=shared is not None)
        return reader.prepare_local_plan(planner.create_local_plan())

    plan = _plan(need, planner, reader, exchange)

    read_together: Callable[[], None] | None = None
    if exchange.world_size > 1 and can_read_together(reader):
        shared_reader: Any = reader
        read_together = shared_reader.read_data_together(lambda: planner.finish_plan(plan), planner, exchange)

    def read() -> None:
        if read_together is not None:
            read_together()
        else:
            reader.read_data(planner.finish_plan(plan), planner).wait()
        assert by_rank is not None
        by_rank.finish()

    exchange.agree("read", read, lambda _: None)


def _plan(
    need: Callable[[], LoadPlan], planner: LoadPlanner, reader: StorageReader, exchange: Exchange
) -> LoadPlan:
    """What this rank reads, once all ranks know what they need."""
    if leaves_plans_alone(planner, "create_global_plan") and leaves_plans_alone(
        reader, "prepare_global_plan"
    ):
        mine: list[LoadPlan] = []
        exchange.agree("plan", lambda: mine.append(need()), lambda _: None)
        return mine[0]
    return exchange.decide(
        "plan", need, lambda needs: reader.prepare_global_plan(planner.create_global_plan(needs))
    )


def _read_shared_metadata(reader: StorageReader, exchange: Exchange) -> Metadata | None:
    """The metadata that all ranks share; None where there are only ranks' own parts.

    Metadata that is there and cannot be read is an error: whatever else is in that place is older.
    """

    def read() -> Metadata | None:
        try:
            return _as_ours(reader.read_metadata())
        except FileNotFoundError:
            if not _takes_keywords(reader.read_metadata):
                raise
            return None

    if is_alike_everywhere(reader, "read_metadata"):
        return exchange.share("read metadata", read)
    # A reader that we do not know may do more than read.
    own: list[Metadata | None] = []
    found = exchange.agree("read metadata", lambda: own.append(read()), lambda _: None)
    assert found is None
    return own[0]


def _read_own_metadata(reader: StorageReader, exchange: Exchange) -> Metadata:
    """What ranks wrote each for itself, as this rank may load it."""
    try:
        return _as_ours(reader.read_metadata(rank=exchange.rank, world_size=exchange.world_size))
    except FileNotFoundError as error:
        if getattr(error, "path", None) is None:
            # Neither is there: say what is missing of the usual kind.
            return _as_ours(reader.read_metadata())
        raise


def _as_ours(metadata: Metadata) -> Metadata:
    """A reader of our kind may have unpickled what it wrote when it was one of torch's."""
    ours: Metadata = to_ours(metadata)
    return ours


def _takes_keywords(method: Callable[..., Any]) -> bool:
    """Whether a plugin knows the keyword arguments that interfaces did not always have."""
    return "kwargs" in inspect.signature(method).parameters


def _set_up(reader: StorageReader, metadata: Metadata, exchange: Exchange, *, is_shared: bool) -> None:
    if _takes_keywords(reader.set_up_storage_reader):
        reader.set_up_storage_reader(
            metadata, exchange.is_coordinator, rank=exchange.rank, use_collectives=is_shared
        )
    else:
        reader.set_up_storage_reader(metadata, exchange.is_coordinator)
