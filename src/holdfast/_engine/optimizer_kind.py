"""Whether a checkpoint has the state of an optimizer of another kind: an SGD's for an AdamW."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

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
    key: str,
) -> None:
    """Raise if no group of a checkpoint can be one of an optimizer's; called before anything is changed.

    A group is one of another kind if it lacks an option that the optimizer needs and also has one that the
    optimizer does not know. One of these alone means another version or options of the user's own. Switches,
    whose defaults are True, False or None, are not needed: new versions add them. An optimizer that changes
    what it loads, by a ``load_state_dict`` or a hook of its own, is never refused.

    Args:
        optimizers: The optimizers that are loaded into.
        groups: The groups of the checkpoint, with anything in the place of their values.
        states: What the checkpoint has for each parameter, likewise.
        key: The name of the optimizer in the state, for messages.

    Raises:
        PlanError: An optimizer is of another kind.
    """
    found = {frozenset(group) - _NO_OPTIONS for group in groups}
    seen: set[tuple[type, frozenset[str]]] = set()
    for optimizer in optimizers:
        known = frozenset(option for group in optimizer.param_groups for option in group) - _NO_OPTIONS
        if (type(optimizer), known) in seen or _changes_what_it_loads(optimizer):
            continue
        seen.add((type(optimizer), known))
        defaults = getattr(optimizer, "defaults", {})
        needed = {name for name, value in defaults.items() if not isinstance(value, bool | None)}
        if found and not any(needed <= options or not options - known - _OF_SCHEDULERS for options in found):
            raise _other_kind(optimizer, known, groups, states, key)


def _changes_what_it_loads(optimizer: Optimizer) -> bool:
    hooks = getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None)
    return type(optimizer).load_state_dict is not Optimizer.load_state_dict or bool(hooks)


def _other_kind(
    optimizer: Optimizer,
    known: Collection[str],
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[Any, Any],
    key: str,
) -> PlanError:
    kind = type(optimizer).__name__
    stored = {option for group in groups for option in group} - _NO_OPTIONS
    kept = {str(name) for state in states.values() if isinstance(state, Mapping) for name in state}
    return PlanError(
        f"{key}: the checkpoint has an optimizer of another kind (nothing was changed). It has "
        f"{_count(len(groups), 'group')} with the options {_listed(stored)}, and keeps "
        f"{_listed(kept) or 'nothing'} for {_count(len(states), 'parameter')}. The optimizer here, "
        f"{kind}, has {_count(len(optimizer.param_groups), 'group')} with the options {_listed(known)}. Make "
        "the optimizer that was saved, or begin with a new one: leave it out of what you load, as "
        'TrainingState.without("optimizer") does.',
        key=key,
        expected=kind,
        found=tuple(sorted(stored)),
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
