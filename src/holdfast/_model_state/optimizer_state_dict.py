"""The state dict of optimizers, read by the names of the parameters and without a step."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast._model_state.flat_optimizer_state import GROUPS, PARAMS, STATE, flattened
from holdfast._model_state.parameter_names import names_by_parameter
from holdfast._model_state.patched_methods import unpatched_method
from holdfast._model_state.state_dict_options import StateDictOptions
from holdfast._model_state.whole_tensors import changed_leaves, delivered, is_left_to_rank0, same_leaf
from holdfast._parameter_states import ParameterStates, remember_flat
from holdfast.errors import UsageError


class NamedOptimizer:
    """An optimizer together with the names of its parameters.

    Attributes:
        optimizer: The optimizer.
        parameters: Its parameters in the order in which it numbers them.
        names: All names of each of them. The first one is used for reading.
        shared: For each of them, whether an optimizer before this one has it as well.
    """

    def __init__(self, optimizer: Optimizer, known: dict[int, tuple[str, ...]], seen: dict[int, int]) -> None:
        self.optimizer = optimizer
        self.parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group[PARAMS]]
        self.names: list[tuple[str, ...]] = []
        self.shared: list[bool] = []
        for number, parameter in enumerate(self.parameters):
            names = known.get(id(parameter))
            if names is None:
                raise ValueError(
                    f"parameter {number} of the {type(optimizer).__name__}, of shape "
                    f"{tuple(parameter.shape)}, is not a parameter of the model; make the optimizer after "
                    "the model has been wrapped, sharded or moved"
                )
            count = seen[id(parameter)] = seen.get(id(parameter), 0) + 1
            self.shared.append(count > 1)
            # The second optimizer of a parameter has a state of its own, which needs a name of its own.
            self.names.append(names if count == 1 else (f"{names[0]}@{count}", *names))

    def state_of(self, number: int) -> dict[Any, Any]:
        """What the optimizer keeps for a parameter now; an empty dict if it keeps nothing."""
        # Only get: the state is a defaultdict, which would make an entry.
        found: dict[Any, Any] = self.optimizer.state.get(self.parameters[number], {})
        return found


def as_tuple(optimizers: Optimizer | Iterable[Optimizer]) -> tuple[Optimizer, ...]:
    """The optimizers of a call, of which one may stand alone.

    Raises:
        UsageError: It is a module.
    """
    if isinstance(optimizers, nn.Module):
        raise UsageError(
            f"the optimizer is a {type(optimizers).__name__}, which is a module: pass the model first, then "
            "the optimizer"
        )
    return (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)


def named_optimizers(
    model: nn.Module, optimizers: Sequence[Optimizer], options: StateDictOptions
) -> list[NamedOptimizer]:
    """The optimizers with the names that their parameters have in ``model``.

    Raises:
        ValueError: An optimizer has a parameter that the model has not.
    """
    known = names_by_parameter(model, options)
    seen: dict[int, int] = {}
    return [NamedOptimizer(optimizer, known, seen) for optimizer in optimizers]


@torch.no_grad()
def read_optimizers(
    model: nn.Module, optimizers: Sequence[Optimizer], options: StateDictOptions
) -> dict[str, Any]:
    """The state of all optimizers together, as it is: nothing is made that is not there yet."""
    states: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    parameters: dict[Any, torch.Tensor] = {}
    for named in named_optimizers(model, optimizers, options):
        own = unpatched_method(named.optimizer, "state_dict")()
        numbers = [number for group in own[GROUPS] for number in group[PARAMS]]
        first_names = [names[0] for names in named.names]
        if len(numbers) != len(first_names):
            raise RuntimeError(
                f"state_dict() of the {type(named.optimizer).__name__} has {len(numbers)} parameters, its "
                f"groups have {len(first_names)}"
            )
        by_number = dict(zip(numbers, first_names, strict=True))
        parameters.update(zip(first_names, named.parameters, strict=True))
        _add_states(states, own[STATE], by_number)
        groups += [{**group, PARAMS: [by_number[n] for n in group[PARAMS]]} for group in own[GROUPS]]
    # The caller may change what it gets. Only tensors are shared with the optimizer.
    groups = changed_leaves(groups, same_leaf)
    if options.flatten_optimizer_state_dict:
        _refuse_other_state(states.keys() - parameters.keys())
    found = (
        flattened(states, groups) if options.flatten_optimizer_state_dict else {STATE: states, GROUPS: groups}
    )
    found = delivered(found, options)
    if is_left_to_rank0(options):
        return {}
    is_flat = options.flatten_optimizer_state_dict
    made = ParameterStates(
        found if is_flat else found[STATE],
        parameters=parameters,
        is_whole=options.full_state_dict,
        device=torch.device("cpu") if options.cpu_offload else None,
        optimizers=optimizers,
    )
    if is_flat:
        remember_flat(made)
    return made if is_flat else {STATE: made, GROUPS: found[GROUPS]}


def _refuse_other_state(keys: Iterable[Any]) -> None:
    for key in keys:
        raise ValueError(
            f"an optimizer keeps state under {key!r}, which is none of its parameters: the flattened form "
            "has no place for it. Leave out flatten_optimizer_state_dict=True."
        )


def _add_states(states: dict[Any, Any], own: dict[Any, Any], by_number: dict[Any, str]) -> None:
    """Add the states of one optimizer, in the order of its parameters: all ranks must gather in one order."""
    others = [key for key in own if key not in by_number]
    for number in [*(number for number in by_number if number in own), *others]:
        key = by_number.get(number, number)
        if key in states:
            raise ValueError(f"two optimizers have a state of their own under the key {key!r}")
        states[key] = changed_leaves(own[number], same_leaf)
