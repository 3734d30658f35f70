"""The state dict of optimizers, read by the names of the parameters and without a step."""

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast._model_state.flat_optimizer_state import (
    GROUPS,
    PARAMS,
    STATE,
    group_leaves,
    state_leaves,
)
from holdfast._model_state.parameter_names import ParameterNames
from holdfast._model_state.patched_methods import unpatched_method
from holdfast._model_state.state_dict_options import StateDictOptions
from holdfast._model_state.whole_tensors import changed_leaves, delivered, is_left_to_rank0
from holdfast._parameter_states import ParameterStates, remember_flat
from holdfast.errors import UsageError


class NamedOptimizer:
    """An optimizer together with the names of its parameters.

    Attributes:
        optimizer: The optimizer.
        parameters: Its parameters in the order in which it numbers them.
        names: The name of each of them under which its state is read.
        shared: The numbers of those that an optimizer before this one has as well.

    Args:
        optimizer: The optimizer.
        known: The names of the model's parameters.
        earlier: How many of the optimizers before this one have each parameter.
    """

    def __init__(self, optimizer: Optimizer, known: ParameterNames, earlier: Counter[torch.Tensor]) -> None:
        self.optimizer = optimizer
        self.parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group[PARAMS]]
        self.names: list[str] = []
        self.shared: set[int] = set()
        self._others: dict[int, list[str]] = {}
        for number, parameter in enumerate(self.parameters):
            name = known.first.get(parameter)
            if name is None:
                raise ValueError(
                    f"parameter {number} of the {type(optimizer).__name__}, of shape "
                    f"{tuple(parameter.shape)}, is not a parameter of the model; make the optimizer after "
                    "the model has been wrapped, sharded or moved"
                )
            if parameter in known.others:
                self._others[number] = known.others[parameter]
            if parameter in earlier:
                # The second optimizer of a parameter has a state of its own, which needs a name of its own.
                self.shared.add(number)
                self._others[number] = [name, *self._others.get(number, ())]
                name = f"{name}@{earlier[parameter] + 1}"
            self.names.append(name)

    def all_names(self, number: int) -> Iterator[str]:
        """All names of a parameter, beginning with the one under which its state is read."""
        yield self.names[number]
        yield from self._others.get(number, ())

    def state_of(self, number: int) -> dict[Any, Any]:
        """The optimizer's present state of a parameter; an empty dict if there is none."""
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
    known = ParameterNames(model, options)
    earlier: Counter[torch.Tensor] = Counter()
    named: list[NamedOptimizer] = []
    for optimizer in optimizers:
        if named:
            earlier.update(set(named[-1].parameters))
        named.append(NamedOptimizer(optimizer, known, earlier))
    return named


@torch.no_grad()
def read_optimizers(
    model: nn.Module, optimizers: Sequence[Optimizer], options: StateDictOptions
) -> dict[str, Any]:
    """The state of all optimizers together, as it is: nothing is made that is not there yet.

    The caller may change what it gets. Only tensors are shared with the optimizers.
    """
    deliver = functools.partial(delivered, options=options)
    is_flat = options.flatten_optimizer_state_dict
    parameters: dict[Any, torch.Tensor] = {}
    groups: list[dict[str, Any]] = []
    found = ParameterStates(
        parameters=parameters,
        is_whole=options.full_state_dict,
        device=torch.device("cpu") if options.cpu_offload else None,
        optimizers=optimizers,
    )
    others: dict[Any, Any] = {}
    waiting = named_optimizers(model, optimizers, options)
    while waiting:
        # One at a time, and nothing of it is kept: what is only needed on the way is as large as the names.
        own = _OwnState(waiting.pop(0), parameters)
        for key, state in own.take_states():
            if key in found:
                raise ValueError(f"two optimizers have a state of their own under the key {key!r}")
            if is_flat and key not in parameters:
                raise _no_flat_place(key)
            copy = changed_leaves(state, deliver)
            found.update(state_leaves(key, copy) if is_flat else ((key, copy),))
        for group in own.groups:
            names = group.pop(PARAMS)
            groups.append({**changed_leaves(group, deliver), PARAMS: names})
        if others.keys() & own.others.keys():
            raise _two_with_others(own.others)
        others.update(changed_leaves(own.others, deliver))
    if is_left_to_rank0(options):
        return {}
    if not is_flat:
        return {STATE: found, GROUPS: groups, **others}
    for group in groups:
        found.update(group_leaves(group))
    found.update(others)
    remember_flat(found)
    return found


class _OwnState:
    """The ``state_dict()`` of one optimizer, with names instead of numbers.

    Attributes:
        groups: Its groups, with the names of their parameters.
        others: What an optimizer with a ``state_dict`` or hooks of its own has beside state and groups.

    Args:
        named: The optimizer.
        parameters: Where to add its parameters, by name.
    """

    def __init__(self, named: NamedOptimizer, parameters: dict[Any, torch.Tensor]) -> None:
        own = unpatched_method(named.optimizer, "state_dict")()
        if STATE not in own or GROUPS not in own:
            found = ", ".join(map(repr, own))
            raise UsageError(
                f"state_dict() of the {type(named.optimizer).__name__} has {found} and not {STATE!r} and "
                f"{GROUPS!r}, so its values cannot be named by parameters. Save and load the optimizer "
                'itself, as in {"optimizer": optimizer}, or in extra= of TrainingState.'
            )
        numbers = [number for group in own[GROUPS] for number in group[PARAMS]]
        if len(numbers) != len(named.names):
            raise RuntimeError(
                f"state_dict() of the {type(named.optimizer).__name__} has {len(numbers)} parameters, its "
                f"groups have {len(named.names)}"
            )
        parameters.update(zip(named.names, named.parameters, strict=True))
        rest = iter(named.names)
        self.groups = [
            {**group, PARAMS: list(itertools.islice(rest, len(group[PARAMS])))} for group in own[GROUPS]
        ]
        kept = dict(own[STATE])
        self._states = [kept.pop(number, _NO_STATE) for number in numbers]
        # A copy: a dict that was emptied keeps the room for what it had.
        self._of_no_parameter = dict(kept.items())
        self.others = {key: value for key, value in own.items() if key not in (STATE, GROUPS)}

    def take_states(self) -> Iterator[tuple[Any, Any]]:
        """The states, in the order of the parameters: all ranks must gather in one order.

        Last come those that belong to no parameter, under the keys that they have.
        """
        self._states.reverse()
        for name in itertools.chain.from_iterable(group[PARAMS] for group in self.groups):
            state = self._states.pop()
            if state is not _NO_STATE:
                yield name, state
        yield from self._of_no_parameter.items()


_NO_STATE = object()


def _two_with_others(others: Iterable[Any]) -> ValueError:
    return ValueError(
        f"several optimizers have values under {', '.join(map(repr, others))} beside their state and groups; "
        "read and set the state of each of them by itself"
    )


def _no_flat_place(key: Any) -> ValueError:
    return ValueError(
        f"an optimizer keeps state under {key!r}, which is none of its parameters: the flattened form has no "
        "place for it. Leave out flatten_optimizer_state_dict=True."
    )
