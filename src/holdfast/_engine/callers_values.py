"""Which values of a state that was opened for a load are the caller's own: a failed load changes them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast._engine.stateful_objects import OpenedState


def is_callers_own(path: Sequence[Any], original: Any, opened: Any, found: Sequence[OpenedState]) -> bool:
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
