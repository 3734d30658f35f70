"""State dicts that know what they are the state of, so that a load can make room for what is missing."""

import copy
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["ModuleStates", "ParameterStates", "joined_layout", "remember_flat"]


class _InformedStates(dict[Any, Any]):
    """A dict that knows more than its entries. Copies are plain dicts, and pickles come back as OrderedDicts.

    ``torch.load`` refuses every other function that makes a dict, unless it may run code.
    """

    def __copy__(self) -> dict[Any, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())


class ModuleStates(_InformedStates):
    """The state of modules, by names: a load gives memory to those of them that are on the meta device.

    It is a dict like any other.

    Args:
        states: The entries.
        modules: The modules.
    """

    def __init__(self, states: Mapping[str, Any], *, modules: Sequence[torch.nn.Module]) -> None:
        super().__init__(states)
        self.modules = modules


class ParameterStates(_InformedStates):
    """The part of an optimizer's state dict that has an entry for each parameter, or all of a flattened one.

    It is a dict like any other. A load uses what else it knows: an optimizer that has not taken a step has
    no state yet, and what is missing in the dict and stands in the checkpoint is made and loaded.

    Args:
        states: The entries. They are keyed by the names of the parameters, or are empty.
        parameters: The parameters by name, in the order in which the optimizer numbers them.
        is_whole: Make every tensor whole, whatever layout the parameter has.
        device: Where to make tensors; None for the device of the parameter.
        optimizers: The optimizers whose state this is, as far as they are known.
    """

    def __init__(
        self,
        states: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = (),
        *,
        parameters: Mapping[Any, torch.Tensor],
        is_whole: bool = False,
        device: torch.device | None = None,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        super().__init__(states)
        self.parameters = parameters
        self.is_whole = is_whole
        self.device = device
        self.optimizers = optimizers


class _Origin(NamedTuple):
    """Where a flattened state dict comes from: its first key, and what a ParameterStates knows."""

    key: str
    parameters: Mapping[Any, torch.Tensor]
    is_whole: bool
    device: torch.device | None


_origins: "weakref.WeakKeyDictionary[torch.optim.Optimizer, _Origin]" = weakref.WeakKeyDictionary()


def remember_flat(states: ParameterStates) -> None:
    """Remember whose state a flattened state dict is, so that a dict into which it is copied is known too.

    Programs join the flattened state dicts of the parts of a model: ``{**first, **second}``. The result is a
    plain dict, but its keys are the same objects. So the first key tells where the entries come from.
    """
    for optimizer in states.optimizers[:1]:
        for key in itertools.islice(states, 1):
            _origins[optimizer] = _Origin(key, states.parameters, states.is_whole, states.device)


def joined_layout(node: Mapping[Any, Any]) -> ParameterStates | None:
    """Parameters and layout of a plain dict that was joined from flattened state dicts; None for others.

    The result has no entries.
    """
    keys = set(map(id, node))
    found = [(optimizer, origin) for optimizer, origin in _origins.items() if id(origin.key) in keys]
    if not found:
        return None
    _, first = found[0]
    parameters = {name: one for _, origin in found for name, one in origin.parameters.items()}
    optimizers = [optimizer for optimizer, _ in found]
    return ParameterStates(
        parameters=parameters, is_whole=first.is_whole, device=first.device, optimizers=optimizers
    )
