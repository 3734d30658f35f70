"""Stateful objects, wherever they stand in a state: replaced by their state, and given it back."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast._model_state.exact_load import load_exactly
from holdfast._plan.flatten import PLAIN_VALUES, refusing_endless
from holdfast._user_warning import warn_user
from holdfast.errors import UsageError
from holdfast.stateful import Stateful

ABSENT = object()
"""Stands for the value of a key that a container does not have."""


@dataclass(frozen=True)
class OpenedState:
    """A Stateful object and what stands for it.

    Attributes:
        owner: The object.
        state: What its ``state_dict`` gave.
        opened: The same with the Stateful objects in it replaced in turn; ``state`` itself if there are none.
    """

    owner: Stateful
    state: Any
    opened: Any


def open_states(state: Mapping[Any, Any] | Stateful) -> tuple[dict[Any, Any], list[OpenedState]]:
    """A copy of the nested containers in which every Stateful object is replaced by its state.

    A warning says if an optimizer does not train the module beside it.

    Leaves are shared with the original, and so are containers in which there is nothing to replace. A single
    Stateful object stands for its own state.

    Returns:
        The copy, and the objects, inner ones before those that hold them, else in the order of their keys
        as text, which is the same on every rank.

    Raises:
        UsageError: The state is neither a mapping nor a Stateful object, or it contains itself.
    """
    found: list[OpenedState] = []
    with refusing_endless():
        opened = _open(state, found) if not isinstance(state, Mapping) else _open_entries(state, found)
    if not isinstance(opened, Mapping):
        kind = f"the class {state.__name__}" if isinstance(state, type) else f"a {type(state).__name__}"
        kind = kind.replace("a NoneType", "None")
        raise UsageError(
            f"the state to save or load must be a dict, such as {{'model': model, 'step': 7}}. This one is "
            f"{kind}: put it into a dict, under a name that you choose.",
            found=type(state).__name__,
        )
    owners = [inner.owner for inner in found]
    _warn_of_stale(
        [owner for owner in owners if isinstance(owner, torch.nn.Module)],
        [owner for owner in owners if isinstance(owner, torch.optim.Optimizer)],
    )
    return opened, found  # type: ignore[return-value]


def _warn_of_stale(modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Warn of optimizers that were probably made before the modules of the same state got other parameters.

    Such an optimizer has parameters that no module has, while the modules have trainable parameters of the
    same shapes that no optimizer has. An optimizer of a module that is not in the state has other shapes, as
    a rule. It may have the same, so this is no error.

    Args:
        modules: The modules of a state that is saved or loaded.
        optimizers: Its optimizers.
    """
    if not modules or not optimizers:
        return
    held = {id(one): one for module in modules for one in module.parameters()}
    trained = [[one for group in some.param_groups for one in group["params"]] for some in optimizers]
    taken = {id(one) for parameters in trained for one in parameters}
    free = Counter(one.shape for one in held.values() if one.requires_grad and id(one) not in taken)
    for optimizer, parameters in zip(optimizers, trained, strict=True):
        lost = Counter(one.shape for one in parameters if id(one) not in held)
        if lost and lost <= free:
            warn_user(
                f"{type(optimizer).__name__} has {lost.total()} of {len(parameters)} parameters that no "
                "module of this state has, while the modules have parameters of the same shapes that no "
                "optimizer has. It was probably made before the model got the parameters that it has now (by "
                "fully_shard, parallelize_module, to_empty or a wrapper), so that it does not train the "
                "model. Make the optimizer after that. If it belongs to another model, save and load that "
                "model in the same state.",
            )


def _open_entries(entries: Mapping[Any, Any], found: list[OpenedState]) -> dict[Any, Any]:
    opened = dict(entries.items())
    # An object may talk to other ranks when it is asked: all ranks ask in one order, whatever their dicts'.
    may_hold_objects = [key for key, value in opened.items() if not isinstance(value, torch.Tensor)]
    for key in sorted(may_hold_objects, key=lambda key: (str(key), type(key).__name__)):
        opened[key] = _open(opened[key], found)
    return opened


def _open(value: Any, found: list[OpenedState]) -> Any:
    if type(value) in PLAIN_VALUES or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        entries = _open_entries(value, found)
        if all(entries[key] is value[key] for key in entries):
            return value
        return OrderedDict(entries) if isinstance(value, OrderedDict) else entries
    if isinstance(value, list):
        items = [_open(entry, found) for entry in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else items
    if isinstance(value, Stateful) and not isinstance(value, type):
        state = value.state_dict()
        opened = _open(state, found)
        found.append(OpenedState(value, state, opened))
        return opened
    return value


def entries_of(container: Any) -> Iterable[tuple[Any, Any]]:
    """The keys or positions of a dict or list, each with what stands there."""
    return container.items() if isinstance(container, Mapping) else enumerate(container)


def copy_with(container: Any, changed: Mapping[Any, Any]) -> Any:
    """A dict, OrderedDict or list like ``container``, with other values under some keys or positions."""
    copied: Any = list(container) if isinstance(container, list) else dict(container)
    if isinstance(container, OrderedDict):
        copied = OrderedDict(container)
    for key, value in changed.items():
        copied[key] = value
    return copied


def return_states(
    original: dict[Any, Any] | Stateful, opened: dict[Any, Any], found: list[OpenedState]
) -> None:
    """After a load into ``opened``: give each object its state, and put loaded values where they belong."""
    states = {id(inner.opened) for inner in found}
    for inner in found:
        if inner.opened is not inner.state:
            _put_all_back(inner.state, inner.opened, states)
        if isinstance(inner.owner, torch.optim.Optimizer):
            load_exactly(inner.owner, inner.state)
        else:
            inner.owner.load_state_dict(inner.state)
    if not isinstance(original, Mapping):
        return  # a single object, which has its state by now
    _put_all_back(original, opened, states)
    if type(original) not in (dict, OrderedDict):
        # A mapping of the caller's may want to know what was loaded: torch tells it so.
        owners = {id(inner.owner) for inner in found}
        for key in [key for key, value in original.items() if id(value) not in owners]:
            original[key] = original[key]


def _put_all_back(original: Any, opened: Any, states: set[int]) -> None:
    """Put loaded values into the original containers; what stands for an object is left to the object."""
    is_list = isinstance(original, list)
    for key, value in entries_of(opened):
        before = original[key] if is_list else original.get(key, ABSENT)
        # Most of what stands in a state is where it was.
        if before is value or id(value) in states:
            continue
        is_copy = isinstance(before, Mapping | list) and type(before) is type(value)
        if is_copy and len(before) == len(value):
            _put_all_back(before, value, states)
        else:
            original[key] = value
