"""Modules on the meta device: a load gives their parameters and buffers memory, or refuses before it reads.

A module gets its state by ``load_state_dict``, which copies into the parameters that it has. Into a
parameter on the meta device nothing can be copied, and torch only warns. So the parameters become what was
loaded first.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast._engine.stateful_objects import OpenedState, entries_of
from holdfast._human_units import some_of
from holdfast._parameter_states import ModuleStates
from holdfast._tensors.chunks import PLAIN_TYPES, is_without_memory
from holdfast._tensors.meta_memory import alias_of, take_the_place
from holdfast.errors import MissingKeyError, PlanError, UsageError
from holdfast.load_result import LoadResult

_MOST_NAMED = 20
_INSTEAD = "Or call to_empty(device=...) on the module before the load, and set them yourself"


@dataclass
class _MetaModule:
    """A module with tensors on the meta device.

    Attributes:
        module: The module.
        opened: What stands for it in the state that is loaded.
        tensors: The parameters and buffers that are on the meta device, by their names in the module.
        in_state: Those that the opened state has, by their names there, which hooks may have changed. Several
            under one name are aliases of each other.
    """

    module: torch.nn.Module
    opened: Mapping[str, Any]
    tensors: dict[str, torch.Tensor]
    in_state: dict[str, list[torch.Tensor]]

    def ids_in_state(self) -> set[int]:
        return {id(tensor) for tensors in self.in_state.values() for tensor in tensors}


class MetaTensors:
    """The objects of a state that have tensors on the meta device; made when their states are opened.

    Args:
        found: The objects of the state.
    """

    def __init__(self, found: Iterable[OpenedState]) -> None:
        self._modules: list[_MetaModule] = []
        self._others: list[OpenedState] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        for inner in found:
            if isinstance(inner.owner, torch.optim.Optimizer):
                self._optimizers.append(inner.owner)
            elif not _has_meta(inner.opened):
                continue
            elif isinstance(inner.owner, torch.nn.Module) and isinstance(inner.opened, Mapping):
                self._modules.append(_look_at(inner.owner, inner.opened))
            else:
                self._others.append(inner)
                self._look_inside(inner.opened)

    def _look_inside(self, state: Any) -> None:
        """Find modules whose state stands in that of another object, such as a TrainingState."""
        if isinstance(state, ModuleStates):
            self._modules += [_look_at(module, state) for module in state.modules]
        elif isinstance(state, Mapping | list):
            for _, value in entries_of(state):
                self._look_inside(value)

    def check(self, state: Mapping[str, Any] | None, result: LoadResult) -> None:
        """Raise if something would stay on the meta device after the load; nothing is changed.

        Args:
            state: The flat state; None if it is not known, so that less can be checked.
            result: What of it will be loaded.

        Raises:
            MissingKeyError: The checkpoint does not have a parameter or buffer in this shape.
            UsageError: It cannot have one, because ``state_dict`` does not give it; or an optimizer holds
                parameters on the meta device that no module of the state holds.
        """
        for found in self._modules:
            _refuse_unsaved(found)
        if self._modules and state is not None:
            left_alone = set(result.left_alone)
            filled = {
                alias_of(value)
                for key, value in state.items()
                if is_without_memory(value) and key not in left_alone
            }
            for found in self._modules:
                _refuse_unfilled(found, filled)
        self._refuse_optimizers()

    def _refuse_optimizers(self) -> None:
        get_memory = {number for found in self._modules for number in found.ids_in_state()}
        for optimizer in self._optimizers:
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            lost = [one for one in parameters if is_without_memory(one) and id(one) not in get_memory]
            if lost:
                raise UsageError(
                    f"{type(optimizer).__name__} was made for {len(lost)} parameters on the meta device, "
                    "which no module of this state holds, so that what is loaded for them would be lost "
                    "(nothing was changed). Load the module in the same call, or load it first and make the "
                    "optimizer after that"
                )

    def materialise(self) -> None:
        """After the load, before ``load_state_dict``: let parameters and buffers become what was loaded.

        Raises:
            UsageError: As ``check``.
            PlanError: One was not loaded, or cannot be replaced.
        """
        for found in self._modules:
            _refuse_unsaved(found)
            done: set[int] = set()
            for name, tensors in found.in_state.items():
                for tensor in tensors:
                    # Tied parameters are one tensor with several names.
                    if id(tensor) not in done:
                        _materialise(name, tensor, found.opened[name])
                        done.add(id(tensor))

    def check_after(self) -> None:
        """After ``load_state_dict``: raise if an object kept its tensors on the meta device.

        Raises:
            PlanError: One did.
        """
        for inner in self._others:
            if _has_meta(inner.owner.state_dict()):
                raise PlanError(
                    f"{type(inner.owner).__name__} has tensors on the meta device also after the load: its "
                    "load_state_dict copies into them, which does nothing. Give them memory before the load "
                    "(module.to_empty(device=...)), or let load_state_dict assign what it gets"
                )


def _look_at(module: torch.nn.Module, opened: Mapping[str, Any]) -> _MetaModule:
    named = [*module.named_parameters(), *module.named_buffers()]
    tensors = {name: value for name, value in named if is_without_memory(value)}
    by_alias: dict[Hashable, list[torch.Tensor]] = {}
    for value in tensors.values():
        by_alias.setdefault(alias_of(value), []).append(value)
    in_state = {
        name: by_alias[alias]
        for name, value in opened.items()
        if is_without_memory(value) and (alias := alias_of(value)) in by_alias
    }
    return _MetaModule(module, opened, tensors, in_state)


def _refuse_unsaved(found: _MetaModule) -> None:
    saved = found.ids_in_state()
    unsaved = [name for name, tensor in found.tensors.items() if id(tensor) not in saved]
    if unsaved:
        raise UsageError(
            f"{type(found.module).__name__} is on the meta device, and its state_dict does not give "
            f"{some_of(unsaved, _MOST_NAMED)}, so that the checkpoint cannot have them: non-persistent "
            "buffers, or what a hook replaces (nothing was changed). Compute them on a real device before "
            f"the load. {_INSTEAD}",
            key=unsaved[0],
        )


def _refuse_unfilled(found: _MetaModule, filled: set[Hashable]) -> None:
    unfilled = [name for name, tensors in found.in_state.items() if alias_of(tensors[0]) not in filled]
    if unfilled:
        raise MissingKeyError(
            f"{type(found.module).__name__} is on the meta device, and nothing is loaded for "
            f"{some_of(unfilled, _MOST_NAMED)}: they would stay without memory (nothing was changed). Give "
            f"them memory and values before the load. {_INSTEAD}",
            key=unfilled[0],
        )


def _materialise(name: str, tensor: torch.Tensor, loaded: Any) -> None:
    if not isinstance(loaded, torch.Tensor) or is_without_memory(loaded):
        raise PlanError(
            f"{name} is on the meta device, and the planner did not give it memory. Call "
            "to_empty(device=...) on the module before the load",
            key=name,
        )
    try:
        take_the_place(tensor, loaded)
    except RuntimeError as error:
        raise PlanError(
            f"{name} is on the meta device, and torch cannot give it memory: {error}. Call "
            "to_empty(device=...) on the module before the load",
            key=name,
        ) from error


def _has_meta(state: Any) -> bool:
    """Whether a tensor of a nested state is on the meta device."""
    if not isinstance(state, Mapping | list):
        return is_without_memory(state)
    for _, value in entries_of(state):
        # The short question first: a state may have 100,000 of them.
        if value.is_meta if type(value) in PLAIN_TYPES else _has_meta(value):
            return True
    return False
