"""Saving a checkpoint."""

import os
from typing import Any

import torch.distributed as dist
from typing_extensions import deprecated

from holdfast._engine.collector import paused_collector
from holdfast._engine.save import run_save
from holdfast._engine.stateful import open_states
from holdfast._foreign import our_save_planner, our_storage_writer
from holdfast._ranks.among_ranks import DEFAULT_PEER_TIMEOUT, open_exchange
from holdfast._ranks.exchange import Exchange
from holdfast._storage_choice import choose_writer
from holdfast.default_planner import DefaultSavePlanner
from holdfast.metadata import STATE_DICT_TYPE, Metadata
from holdfast.planner import SavePlanner
from holdfast.storage import StorageWriter

__all__ = ["save", "save_state_dict"]


@paused_collector()
def save(
    state_dict: STATE_DICT_TYPE,  # type: ignore[type-arg]
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    peer_timeout: float = DEFAULT_PEER_TIMEOUT,
) -> Metadata:
    """Save a state: on every rank of the group, each its own part.

    When ``save`` returns, on any rank, the checkpoint is complete, counted and on stable storage. When it
    raises, what was at that place before is there still, whole; only if making the finished commit durable
    is what failed, the new one is. A crash at any instant leaves the old checkpoint or the new one.

    Stateful objects (modules, optimizers), wherever they stand in the state, are saved as their
    ``state_dict()``. Nested dicts, lists, tuples, numbers, strings, bytes and other picklable values are
    saved as they are, keys of every type included.

    Args:
        state_dict: What to save. It is not changed.
        checkpoint_id: Where to: a folder. Not needed if ``storage_writer`` knows.
        storage_writer: What to write with; by default a ``FileSystemWriter`` on ``checkpoint_id``.
        planner: What decides what is written; by default ``DefaultSavePlanner()``.
        process_group: The ranks that save together; by default all. Rank 0 of it coordinates.
        no_dist: Save from this process alone, whatever groups there are.
        use_collectives: False: each rank writes a checkpoint of its own part, ``__{rank}.metadata``,
            without a word to the others.
        peer_timeout: After how many seconds without a sign of life a rank is taken for dead, and all
            others raise. Slow storage is not silence: a rank that writes for hours is waited for.

    Returns:
        The metadata of the checkpoint.

    Raises:
        UsageError: Neither a place nor a writer was given.
        CheckpointException: A step failed on some rank; also an instance of that failure's class.

    Example:
        >>> holdfast.save({"model": model, "optimizer": optimizer}, checkpoint_id="checkpoints/100")
    """
    with open_exchange(
        process_group,
        purpose="save",
        no_dist=no_dist,
        use_collectives=use_collectives,
        peer_timeout=peer_timeout,
    ) as exchange:
        opened, _ = open_states(state_dict)
        writer = choose_writer(storage_writer, checkpoint_id)
        return _save(opened, writer, planner, exchange, use_collectives=use_collectives)


@deprecated("save_state_dict is deprecated: use save", category=FutureWarning)
def save_state_dict(
    state_dict: STATE_DICT_TYPE,  # type: ignore[type-arg]
    storage_writer: StorageWriter,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Metadata:
    """The name of :func:`save` before torch 2.2. Stateful objects are not opened."""
    with open_exchange(
        process_group, purpose="save", no_dist=no_dist, coordinator_rank=coordinator_rank
    ) as exchange:
        storage_writer.reset()
        return _save(state_dict, storage_writer, planner, exchange)


def _save(
    state_dict: dict[str, Any],
    writer: StorageWriter,
    planner: SavePlanner | None,
    exchange: Exchange,
    *,
    use_collectives: bool = True,
) -> Metadata:
    return run_save(
        state_dict,
        DefaultSavePlanner() if planner is None else our_save_planner(planner),
        our_storage_writer(writer),
        exchange,
        use_collectives=use_collectives,
    )
