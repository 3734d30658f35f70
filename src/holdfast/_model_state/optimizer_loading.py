"""State dicts of optimizers, in every form that they come in, set into optimizers."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast._model_state.exact_load import ParameterNumbers, load_exactly
from holdfast._model_state.flat_optimizer_state import (
    GROUPS,
    PARAM_NAMES,
    PARAMS,
    STATE,
    is_beside,
    unflattened,
)
from holdfast._model_state.optimizer_kind import refuse_other_kind
from holdfast._model_state.optimizer_state_dict import NamedOptimizer, named_optimizers
from holdfast._model_state.optimizer_tensors import placed_state, received_states, refuse_indivisible
from holdfast._model_state.rank0_broadcast import SentState
from holdfast._model_state.saved_groups import SavedGroups
from holdfast._model_state.state_dict_options import StateDictOptions
from holdfast._model_state.whole_tensors import changed_leaves


@dataclass
class _SavedOptimizers:
    """A saved state dict of optimizers, of any form, by the names of parameters.

    Attributes:
        states: What was kept for each parameter; no entry if nothing was.
        groups: The groups of all optimizers.
        others: What was kept under keys that are no parameters.
        beside: What an optimizer with a ``state_dict`` of its own has beside state and groups.
    """

    states: dict[Any, Any]
    groups: SavedGroups = field(default_factory=SavedGroups)
    others: dict[Any, Any] = field(default_factory=dict)
    beside: dict[Any, Any] = field(default_factory=dict)

    def known_name(self, names: Iterable[str]) -> str | None:
        """The first of a parameter's names that was saved."""
        return next((name for name in names if name in self.groups.place_of or name in self.states), None)


@torch.no_grad()
def set_optimizers(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    state_dict: Mapping[str, Any],
    options: StateDictOptions,
) -> None:
    """Load the state dict into the optimizers. If it does not fit, nothing is changed."""
    named = named_optimizers(model, optimizers, options)
    if not options.broadcast_from_rank0:
        fitted = [(one.optimizer, state) for one, state in _fitted(named, _read(state_dict, named), options)]
        del named  # the names take as much memory as torch needs for the load
        for optimizer, numbered in fitted:
            load_exactly(optimizer, numbered)
        return
    devices = (parameter.device for one in named for parameter in one.parameters)
    sent = SentState(dict(state_dict), next(devices, None))
    problem, destined = None, []
    try:
        destined = _fitted(named, _read(sent.tree, named), options)
        refuse_indivisible(destined)
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        problem = error
    sent.agree(problem)
    received = received_states(sent, destined)
    for one, loaded in received:
        load_exactly(one.optimizer, loaded)


def _read(state_dict: Mapping[str, Any], named: Sequence[NamedOptimizer]) -> _SavedOptimizers:
    found = _SavedOptimizers({})
    if STATE not in state_dict and GROUPS not in state_dict:
        current = {
            name: one.state_of(number)
            for one in named
            for number in range(len(one.names))
            for name in one.all_names(number)
        }
        for name, state, options in unflattened(state_dict, current):
            if state:
                found.states[name] = state
            if options:
                found.groups.add(options, [name])
        found.beside = {key: value for key, value in state_dict.items() if is_beside(key)}
        return found
    groups = state_dict.get(GROUPS, [])
    names = _names_of_numbers(groups, named)
    for group in groups:
        found.groups.add(
            {key: value for key, value in group.items() if key != PARAMS},
            [names.get(one, one) for one in group[PARAMS]],
        )
    of_parameters = names or found.groups.place_of
    for key, state in state_dict.get(STATE, {}).items():
        is_parameter = key in of_parameters or not groups
        (found.states if is_parameter else found.others)[names.get(key, key)] = state
    found.beside = {key: value for key, value in state_dict.items() if key not in (STATE, GROUPS)}
    return found


def _names_of_numbers(groups: Sequence[Mapping[str, Any]], named: Sequence[NamedOptimizer]) -> dict[Any, str]:
    """The names for the numbers of ``optimizer.state_dict()``, which count the parameters in their order.

    There are none if the groups have names.
    """
    numbers = [number for group in groups for number in group[PARAMS]]
    if not all(isinstance(number, int) for number in numbers) or not numbers:
        return {}
    if len(named) != 1:
        raise ValueError(
            "a state dict with numbers instead of names belongs to one optimizer; it cannot be set into "
            f"{len(named)}"
        )
    saved = [len(group[PARAMS]) for group in groups]
    own = [len(group[PARAMS]) for group in named[0].optimizer.param_groups]
    if saved != own:
        raise ValueError(
            f"a state dict with numbers instead of names needs groups of the same sizes: it has {saved}, the "
            f"optimizer {own}"
        )
    return dict(zip(numbers, named[0].names, strict=True))


def _fitted(
    named: Sequence[NamedOptimizer], saved: _SavedOptimizers, options: StateDictOptions
) -> list[tuple[NamedOptimizer, dict[str, Any]]]:
    """For each optimizer the state dict to load, with numbers.

    Raises:
        RuntimeError: A parameter that requires gradients is not known, and the options say strict.
        ValueError: There is a state that belongs to no parameter, and more than one optimizer; or, as a
            PlanError, this is the state of another kind of optimizer.
    """
    refuse_other_kind([one.optimizer for one in named], saved.groups.options, saved.states)
    chosen = [[saved.known_name(one.all_names(number)) for number in range(len(one.names))] for one in named]
    missing = [
        one.names[number]
        for one, names in zip(named, chosen, strict=True)
        for number, name in enumerate(names)
        if name is None and one.parameters[number].requires_grad
    ]
    if missing and options.strict:
        raise RuntimeError(
            f"Missing optimizer state for parameter(s) {', '.join(missing)}: they are in no group of the "
            "state dict. They were added after it was made, or have other names. To leave their state as it "
            "is, load with allow_partial_load=True, or use StateDictOptions(strict=False)."
        )
    if saved.others and len(named) > 1:
        raise ValueError(
            f"it is not known which optimizer has the state under {', '.join(map(str, saved.others))}"
        )
    return [
        (one, _numbered(one, names, saved, is_whole=options.full_state_dict))
        for one, names in zip(named, chosen, strict=True)
    ]


def _numbered(
    one: NamedOptimizer,
    names: Sequence[str | None],
    saved: _SavedOptimizers,
    *,
    is_whole: bool,
) -> dict[str, Any]:
    own = one.optimizer.param_groups
    numbered, end = [], 0
    for group in own:
        begin, end = end, end + len(group[PARAMS])
        numbered.append(ParameterNumbers(range(begin, end)))
    states: dict[Any, Any] = {}
    for number in itertools.chain.from_iterable(numbered):
        name, parameter = names[number], one.parameters[number]
        current = one.state_of(number)
        if name is None:
            state: Any = current
        else:
            state = saved.states.get(name)
            if is_whole and isinstance(parameter, DTensor):
                state = placed_state(state, None, parameter, current)
            if number in one.shared and name != one.names[number]:
                state = changed_leaves(state, _own_copy)
        if state:
            states[number] = state
    groups = []
    taken = saved.groups.take_options(own, [[names[number] for number in numbers] for numbers in numbered])
    for group, numbers, options in zip(own, numbered, taken, strict=True):
        if PARAM_NAMES in group:
            # They belong to the parameters of this optimizer, in its order.
            options.pop(PARAM_NAMES, None)
        now = {key: value for key, value in group.items() if key != PARAMS}
        groups.append({**now, **options, PARAMS: numbers})
    states.update(saved.others)
    return {**saved.beside, STATE: states, GROUPS: groups}


def _own_copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
