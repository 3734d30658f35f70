"""Whether a state dict is that of an optimizer of another kind: an SGD's for an AdamW."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.optim import Optimizer

from holdfast.errors import PlanError

_NO_OPTIONS = frozenset({"params", "param_names"})
_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
"""What torch's schedulers add to the groups of any optimizer."""


def refuse_other_kind(
    optimizers: Iterable[Optimizer],
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[Any, Any],
    *,
    key: str = "",
) -> None:
    """Raise if no group that was saved can be one of an optimizer's; called before anything is changed.

    A group is one of another kind if it lacks an option that the optimizer needs and also has one that the
    optimizer does not know. One of these alone means another version or options of the user's own. Switches,
    whose defaults are True, False or None, are not needed: new versions add them. An optimizer that changes
    what it loads, by a ``load_state_dict`` or a hook of its own, is never refused.

    Args:
        optimizers: The optimizers that are loaded into.
        groups: The groups that were saved, with anything in the place of their values.
        states: What was saved for each parameter, likewise.
        key: The name of the optimizer in the state, for messages.

    Raises:
        PlanError: An optimizer is of another kind.
    """
    seen: set[tuple[type, frozenset[str]]] = set()
    for optimizer in optimizers:
        known = frozenset(option for group in optimizer.param_groups for option in group) - _NO_OPTIONS
        if (type(optimizer), known) not in seen and not _changes_what_it_loads(optimizer):
            seen.add((type(optimizer), known))
            defaults = getattr(optimizer, "defaults", {})
            here = _Kind(type(optimizer).__name__, known, defaults, len(optimizer.param_groups))
            _refuse(here, groups, states, key)


def refuse_other_options(
    own: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[Any, Any],
    *,
    key: str,
) -> None:
    """As ``refuse_other_kind``, for a state dict whose optimizer is not known.

    Args:
        own: The groups of the state dict that is loaded into.
        groups: See ``refuse_other_kind``.
        states: Likewise.
        key: Likewise.

    Raises:
        PlanError: They are groups of an optimizer of another kind.
    """
    options = {name: value for group in own for name, value in group.items() if name not in _NO_OPTIONS}
    _refuse(
        _Kind("of which the state has the state_dict()", frozenset(options), options, len(own)),
        groups,
        states,
        key,
    )


class _Kind(NamedTuple):
    """An optimizer that is loaded into: what it is called, its options with their values, how many groups."""

    name: str
    known: frozenset[str]
    defaults: Mapping[str, Any]
    group_count: int


def _refuse(here: _Kind, groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Any], key: str) -> None:
    found = {frozenset(group) - _NO_OPTIONS for group in groups}
    needed = {name for name, value in here.defaults.items() if not isinstance(value, bool | None)}
    may_know = here.known | _OF_SCHEDULERS
    if found and not any(needed <= options or options <= may_know for options in found):
        raise _other_kind(here, groups, states, key)


def _changes_what_it_loads(optimizer: Optimizer) -> bool:
    hooks = getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None)
    return type(optimizer).load_state_dict is not Optimizer.load_state_dict or bool(hooks)


def _other_kind(
    here: _Kind, groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Any], key: str
) -> PlanError:
    stored = {option for group in groups for option in group} - _NO_OPTIONS
    kept = {str(name) for state in states.values() if isinstance(state, Mapping) for name in state}
    place = f"{key}: " if key else ""
    return PlanError(
        f"{place}what was saved is the state of an optimizer of another kind (nothing was changed). It has "
        f"{_count(len(groups), 'group')} with the options {_listed(stored)}, and keeps "
        f"{_listed(kept) or 'nothing'} for {_count(len(states), 'parameter')}. The optimizer here, "
        f"{here.name}, has {_count(here.group_count, 'group')} with the options {_listed(here.known)}. Make "
        "the optimizer that was saved, or begin with a new one: leave it out of what you load, as "
        'TrainingState.without("optimizer") does.',
        key=key or None,
        expected=here.name,
        found=tuple(sorted(stored)),
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
