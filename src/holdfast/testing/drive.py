"""Runs a save or a load of any number of ranks in one process, in the order of the contract.

This is the order of :class:`holdfast.SavePlanner`, :class:`holdfast.StorageWriter` and their loading
counterparts, one rank after the other, without a process group. It shows the order in its simplest form,
and lets contract suites run planners and storages against each other in milliseconds.
"""

from collections.abc import Sequence
from typing import Any

from holdfast.metadata import Metadata
from holdfast.planner import LoadPlanner, SavePlanner
from holdfast.storage import StorageReader, StorageWriter

__all__ = ["drive_load", "drive_save"]

_COORDINATOR = 0


def drive_save(
    states: Sequence[dict[str, Any]],
    planners: Sequence[SavePlanner],
    writers: Sequence[StorageWriter],
) -> Metadata:
    """Save ``states[rank]`` with ``planners[rank]`` and ``writers[rank]``; rank 0 coordinates.

    Returns:
        The metadata that was committed.
    """
    ranks = range(len(states))
    local_plans = []
    for rank in ranks:
        planner, writer = planners[rank], writers[rank]
        writer.reset()
        planner.set_up_planner(states[rank], writer.storage_meta(), rank == _COORDINATOR)
        writer.set_up_storage_writer(rank == _COORDINATOR, rank=rank, use_collectives=True)
        local_plans.append(writer.prepare_local_plan(planner.create_local_plan()))

    global_plans, metadata = planners[_COORDINATOR].create_global_plan(local_plans)
    global_plans = writers[_COORDINATOR].prepare_global_plan(global_plans)

    results = []
    for rank in ranks:
        final_plan = planners[rank].finish_plan(global_plans[rank])
        results.append(writers[rank].write_data(final_plan, planners[rank]).wait())
    writers[_COORDINATOR].finish(metadata, results)
    return metadata


def drive_load(
    states: Sequence[dict[str, Any]],
    planners: Sequence[LoadPlanner],
    readers: Sequence[StorageReader],
) -> None:
    """Load into ``states[rank]``, in place, with ``planners[rank]`` and ``readers[rank]``."""
    ranks = range(len(states))
    local_plans = []
    for rank in ranks:
        planner, reader = planners[rank], readers[rank]
        reader.reset()
        metadata = reader.read_metadata()
        planner.set_up_planner(states[rank], metadata, rank == _COORDINATOR)
        reader.set_up_storage_reader(metadata, rank == _COORDINATOR, rank=rank, use_collectives=True)
        local_plans.append(reader.prepare_local_plan(planner.create_local_plan()))

    global_plans = planners[_COORDINATOR].create_global_plan(local_plans)
    global_plans = readers[_COORDINATOR].prepare_global_plan(global_plans)
    for rank in ranks:
        final_plan = planners[rank].finish_plan(global_plans[rank])
        readers[rank].read_data(final_plan, planners[rank]).wait()
