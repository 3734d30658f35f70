"""Stateful objects, wherever they stand in a state: replaced by their state, and given it back."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from holdfast.stateful import Stateful

__all__ = ["open_states", "return_states"]


def open_states(state: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[tuple[Stateful, dict[str, Any]]]]:
    """A copy of the nested containers in which every Stateful object is replaced by its state.

    Leaves are shared with the original, and so are containers in which there is nothing to replace.

    Returns:
        The copy, and each object with the state that now stands for it.
    """
    found: list[tuple[Stateful, dict[str, Any]]] = []
    opened = {key: _open(value, found) for key, value in state.items()}
    return opened, found


def _open(value: Any, found: list[tuple[Stateful, dict[str, Any]]]) -> Any:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        entries = {key: _open(entry, found) for key, entry in value.items()}
        if all(entries[key] is value[key] for key in entries):
            return value
        return OrderedDict(entries) if isinstance(value, OrderedDict) else entries
    if isinstance(value, list):
        items = [_open(entry, found) for entry in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else items
    if isinstance(value, Stateful) and not isinstance(value, type):
        inner = value.state_dict()
        found.append((value, inner))
        return inner
    return value


def return_states(
    original: dict[Any, Any], opened: dict[Any, Any], found: list[tuple[Stateful, dict[str, Any]]]
) -> None:
    """After a load into ``opened``: give each object its state, and put new top-level values in place."""
    states = {id(state) for _, state in found}
    for stateful, state in found:
        stateful.load_state_dict(state)
    for key, value in opened.items():
        if id(value) not in states:
            _put_back(original, key, value, states)


def _put_back(container: Any, key: Any, value: Any, states: set[int]) -> None:
    """Put a loaded value into the original container; containers that were copied are followed instead."""
    before = container[key] if not isinstance(container, dict) or key in container else None
    if before is value or id(value) in states:
        return
    if isinstance(before, dict) and isinstance(value, dict):
        for inner, entry in value.items():
            _put_back(before, inner, entry, states)
    elif isinstance(before, list) and isinstance(value, list) and len(before) == len(value):
        for number, entry in enumerate(value):
            _put_back(before, number, entry, states)
    else:
        container[key] = value
