"""A load into a state with Stateful objects in it: opened before, given what was loaded after."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast._engine.load import LoadHooks, ReadObjects, run_load
from holdfast._engine.meta_modules import MetaTensors
from holdfast._engine.optimizer_room import OptimizerRooms
from holdfast._engine.ports import LoadPlannerPort, ReaderPort
from holdfast._engine.stateful_objects import OpenedState, open_states, return_states
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
        may_change=lambda path: _is_callers_own(path, state_dict, opened, found),
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


def _is_callers_own(path: Sequence[Any], original: Any, opened: Any, found: Sequence[OpenedState]) -> bool:
    """Whether loading the value at a path changes something that the caller still has if the load fails.

    Tensors are filled in place. Other values are replaced in their containers, and these are the caller's
    only where nothing in them had to be opened. A Stateful object gets its values after a load that succeeds.

    Args:
        path: The keys that lead to the value in ``opened``. If they do not, or it is not known what an object
            does, the answer is yes.
        original: What the caller gave.
        opened: What stands for it.
        found: The objects in it.
    """
    owners = {id(inner.opened): inner.owner for inner in found}
    owner, container = owners.get(id(opened)), opened
    try:
        for key in path[:-1]:
            container = _entry(container, key)
            owner = owners.get(id(container), owner)
            original = _entry(original, key) if isinstance(original, Mapping | list) else None
        value = _entry(container, path[-1])
    except (LookupError, TypeError, ValueError):
        return True
    if isinstance(value, torch.Tensor):
        return _fills_tensors_of(owner)
    if owner is None:
        return container is original
    attributes = getattr(owner, "__dict__", {})
    return any(container is own for own in (attributes, *attributes.values()))


def _entry(container: Any, key: Any) -> Any:
    """The value under a key. Paths may have numbers as text."""
    if isinstance(container, list) or key not in container:
        return container[int(key)]
    return container[key]


def _fills_tensors_of(owner: Any) -> bool:
    """Whether the tensors in the state of an object are its own, and not made for the load."""
    if isinstance(owner, torch.optim.Optimizer):
        return bool(owner.state)  # one that has taken no step has none
    if isinstance(owner, torch.nn.Module):
        first = next(owner.parameters(), None)
        return first is None or not first.is_meta
    return True
