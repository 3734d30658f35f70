"""The flattened form of an optimizer's state dict: one dict, with the name of a parameter in each key.

A dict in the state of a parameter is flattened too if its keys are strings without dots. One with other
keys, such as the numbers of Shampoo's preconditioners, stays a dict: a key of the flat dict could not tell
what they were.
"""

import sys
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

STATE, GROUPS, PARAMS, PARAM_NAMES = "state", "param_groups", "params", "param_names"
"""The keys of an optimizer's state dict."""


def group_leaves(group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The flattened form of a group: all its options for each of its parameters.

    A group without parameters leaves no trace in it.
    """
    options = {key: value for key, value in group.items() if key not in (PARAMS, PARAM_NAMES)}
    own_names = group.get(PARAM_NAMES)
    for place, name in enumerate(group[PARAMS]):
        for option, value in options.items():
            yield f"{GROUPS}.{name}.{option}", value
        if own_names is not None:
            # The list of the whole group under every parameter would be as long as their number squared.
            yield f"{GROUPS}.{name}.{PARAM_NAMES}", [own_names[place]]


def state_leaves(name: Any, state: Any) -> Iterator[tuple[str, Any]]:
    """The flattened form of one parameter's state; nothing if that is empty."""
    if not isinstance(state, dict) or state:
        yield from flat_leaves(f"{STATE}.{name}", state)


def flat_leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The flattened form of a value that belongs under ``key``, and of dicts in it."""
    if _can_be_flattened(value):
        for inner, one in value.items():
            yield from flat_leaves(f"{key}.{inner}", one)
    else:
        yield key, value


def _can_be_flattened(value: Any) -> bool:
    return (
        type(value) in (dict, OrderedDict)
        and bool(value)
        and all(type(key) is str and "." not in key for key in value)
    )


def unflattened(
    flat: Mapping[str, Any], current: Mapping[str, Mapping[Any, Any]]
) -> Iterator[tuple[str, dict[Any, Any], dict[str, Any]]]:
    """Each parameter that the flat dict has, its state and its options.

    Args:
        flat: The flat dict. Entries of parameters that are not in ``current`` are left out.
        current: The state that each parameter has now, by name. Keys that torch's helpers have made strings
            get their type back if they are in it.
    """
    # By parameter: the options of all parameters at once would take as much memory as the flat dict.
    keys: dict[str, list[str]] = {}
    for key in flat:
        parameter = parameter_of(key, current)
        if parameter is not None:
            keys.setdefault(parameter, []).append(key)
    for name, of_parameter in keys.items():
        state: dict[Any, Any] = {}
        options: dict[str, Any] = {}
        for key in of_parameter:
            kind, _, rest = key.partition(".")
            entry = sys.intern(rest[len(name) + 1 :])
            if kind == GROUPS and entry:
                options[entry] = flat[key]
            elif kind == STATE and entry:
                _put(state, current[name], entry, flat[key])
            elif kind == STATE and isinstance(flat[key], dict):
                state = flat[key]
        yield name, state, options


def parameter_of(key: str, names: Collection[str]) -> str | None:
    """The parameter that a key of the flat dict belongs to; None if it is none of ``names``."""
    kind, _, rest = key.partition(".")
    return _known_name(rest, names) if kind in (STATE, GROUPS) else None


def is_beside(key: Any) -> bool:
    """Whether a key of the flat dict belongs neither to a state nor to a group."""
    return not isinstance(key, str) or key.partition(".")[0] not in (STATE, GROUPS)


def _known_name(rest: str, names: Collection[str]) -> str | None:
    """The parameter at the beginning of a key: the longest one, and all of the key if its state is a dict."""
    end = len(rest)
    while end > 0 and rest[:end] not in names:
        end = rest.rfind(".", 0, end)
    return rest[:end] if end > 0 else None


def _put(state: dict[Any, Any], template: Mapping[Any, Any], entry: str, value: Any) -> None:
    keys = {str(key): key for key in template} if template else {}
    if entry in keys or "." not in entry:
        state[keys.get(entry, entry)] = value
        return
    first, _, rest = entry.partition(".")
    key = keys.get(first, first)
    inner = template.get(key)
    _put(state.setdefault(key, {}), inner if isinstance(inner, dict) else {}, rest, value)
