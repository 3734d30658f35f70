"""``load_state_dict`` of an optimizer, after which every value is exactly the one that was loaded."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast._model_state.flat_optimizer_state import GROUPS, PARAMS, STATE
from holdfast._model_state.patched_methods import unpatched_method


class ParameterNumbers(list[int]):
    """The numbers of a group's parameters; they follow each other.

    torch looks every value's parameter up in the list of its group. In a plain list of 10,000 that takes
    seconds.
    """

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and bool(self) and self[0] <= number <= self[-1]


class _HiddenValue:
    """Hides a value from ``load_state_dict``, which rebuilds everything that can be iterated."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _ExactValues:
    """Hooks of one load: they run after all hooks of users before it, and before all hooks of users after it.

    ``Optimizer.load_state_dict`` casts tensors to the dtype of their parameter, and makes an iterator's text
    of a string. So tensors of another dtype go through it as tensors of one element, and other values hidden.
    The values of ``step`` have rules of their own and go through it as they are.
    """

    def __init__(self) -> None:
        self._state_dict: Mapping[str, Any] = {}

    def before(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._state_dict = state_dict
        changed = {}
        for number, state, parameter in self._states(optimizer):
            passed = _passed_through(state, None, parameter)
            # Most states go through as they are; a second dict of all would take as much as the result.
            if passed is not state:
                changed[number] = passed
        return {**state_dict, STATE: {**state_dict[STATE], **changed}} if changed else state_dict

    def after(self, optimizer: Optimizer) -> None:
        for _, state, parameter in self._states(optimizer):
            loaded = optimizer.state.get(parameter)
            if loaded is not None:
                optimizer.state[parameter] = _exact(state, None, parameter.device, loaded)

    def _states(self, optimizer: Optimizer) -> Iterator[tuple[Any, Any, torch.Tensor]]:
        """The number, the saved state and the parameter of each parameter that has a state."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group[PARAMS])
        numbers = (number for group in self._state_dict[GROUPS] for number in group[PARAMS])
        states = self._state_dict[STATE]
        for number, parameter in zip(numbers, parameters, strict=False):
            if number in states:
                yield number, states[number], parameter


def _passed_through(value: Any, key: Any, parameter: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor):
        # __setstate__ of an optimizer may look at numbers. It does not look at larger tensors.
        will_be_cast = value.dtype != parameter.dtype and value.dim() > 0 and key != "step"
        if not will_be_cast:
            return value
        return _stand_in(value.shape, parameter.dtype, parameter.device)
    if type(value) is dict:
        passed = {key: _passed_through(one, key, parameter) for key, one in value.items()}
        # Most states go through as they are; the copies of all parameters would be as large as the result.
        return value if all(passed[key] is one for key, one in value.items()) else passed
    if type(value) in {list, tuple}:
        return type(value)([_passed_through(one, None, parameter) for one in value])
    is_simple = value is None or isinstance(value, bool | int | float | complex)
    return value if is_simple else _HiddenValue(value)


@functools.lru_cache(maxsize=256)
def _stand_in(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of that shape with memory for one element."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


def _exact(value: Any, key: Any, device: torch.device, loaded: Any) -> Any:
    """``value`` on its device; ``loaded`` if the optimizer has made something else of it on purpose."""
    if key == "step":
        return loaded
    if isinstance(loaded, _HiddenValue):
        return loaded.value
    if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return value.to(device)
    if type(value) is dict and type(loaded) is dict and loaded is not value:
        for name, one in loaded.items():
            loaded[name] = _exact(value.get(name), name, device, one)
        return loaded
    if type(value) in {list, tuple} and type(loaded) is type(value) and len(loaded) == len(value):
        pairs = zip(value, loaded, strict=True)
        return type(value)([_exact(one, None, device, other) for one, other in pairs])
    return loaded


def load_exactly(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load a state dict with numbers, as ``optimizer.state_dict()`` has them.

    If the optimizer has its own ``load_state_dict``, it decides what becomes of the values. All hooks run.
    """
    load = unpatched_method(optimizer, "load_state_dict")
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        load(state_dict)
        return
    exact = _ExactValues()
    hooks = [
        optimizer.register_load_state_dict_pre_hook(exact.before),
        optimizer.register_load_state_dict_post_hook(exact.after, prepend=True),
    ]
    try:
        load(state_dict)
    finally:
        for hook in hooks:
            hook.remove()
