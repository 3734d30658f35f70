"""A load into a state with Stateful objects in it: opened before, given what was loaded after."""

from collections.abc import Mapping
from typing import Any

from holdfast._engine.callers_values import is_callers_own
from holdfast._engine.load import LoadHooks, ReadObjects, run_load
from holdfast._engine.meta_modules import MetaTensors
from holdfast._engine.optimizer_room import OptimizerRooms
from holdfast._engine.ports import LoadPlannerPort, ReaderPort
from holdfast._engine.stateful_objects import open_states, return_states
from holdfast._io.progress import ProgressTracker
from holdfast._ranks.exchange import Exchange
from holdfast._transfer_recorder import TransferRecorder
from holdfast.load_result import LoadResult
from holdfast.stateful import Stateful


def load_into(
    state_dict: dict[str, Any] | Stateful,
    planner: LoadPlannerPort,
    reader: ReaderPort,
    exchange: Exchange,
    *,
    progress: ProgressTracker | None = None,
    recorder: TransferRecorder | None = None,
) -> LoadResult:
    """Load into ``state_dict``, in place, as :func:`run_load`; Stateful objects get their loaded state.

    Modules on the meta device get memory, and optimizers that have not taken a step get their state.

    Raises:
        UsageError: The state is neither a dict nor a Stateful object.
        CheckpointException: A step failed on some rank; the same on every rank.
    """
    opened, found = open_states(state_dict)
    on_meta = MetaTensors(found)
    optimizers = OptimizerRooms(opened, found, allow_partial=planner.allows_partial)

    def check(state: Mapping[str, Any] | None, result: LoadResult, read: ReadObjects) -> None:
        on_meta.check(state, result)
        optimizers.check(read)

    hooks = LoadHooks(
        complete=optimizers.make,
        check=check,
        may_change=lambda path: is_callers_own(path, state_dict, opened, found),
    )
    try:
        result = run_load(
            opened,
            planner,
            reader,
            exchange,
            progress=progress,
            hooks=hooks,
            recorder=recorder,
        )
        if recorder is not None:
            recorder.clock.enter("restore")
        on_meta.materialise()
        optimizers.settle()
    except BaseException:
        optimizers.undo()
        raise
    return_states(state_dict, opened, found)
    on_meta.check_after()
    return result
