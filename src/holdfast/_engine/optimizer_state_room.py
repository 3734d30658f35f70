"""Room in one state dict of an optimizer, in each of its forms: by number, by name, plain, and flattened."""

import functools
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast._engine.missing_state import StateMaker
from holdfast._engine.optimizer_groups import assign_groups, check_sizes
from holdfast._model_state.parameter_names import names_by_parameter
from holdfast._model_state.state_dict_options import StateDictOptions
from holdfast._parameter_states import ParameterStates
from holdfast._plan.stored_tree import outermost_key, stored_subclasses, stored_tree
from holdfast.metadata import Metadata


class _Room:
    """One optimizer: a dict with ``state`` and ``param_groups``.

    Args:
        path: The way to it in the state.
        node: The dict.
        layout: The parameters, by the keys that the dict uses, and how to make tensors for them.
    """

    def __init__(self, path: tuple[Any, ...], node: dict[str, Any], layout: ParameterStates) -> None:
        self.path, self.node, self.layout = path, node, layout
        self.before = (node["state"], node["param_groups"])
        self.own_keys: dict[Any, Any] = {}

    def make(self, metadata: Metadata) -> None:
        stored = stored_tree(metadata, self.path)
        if not isinstance(stored, Mapping):
            return
        states, groups = self.before
        if isinstance(stored.get("state"), Mapping):
            self.node["state"] = self._room_for_states(states, stored["state"])
        if isinstance(stored.get("param_groups"), list):
            # An option that the checkpoint does not have keeps its value: older versions had fewer.
            self.node["param_groups"] = [
                self._maker(None).complete(groups[n] if n < len(groups) else None, group, add_own=False)
                for n, group in enumerate(stored["param_groups"])
            ]

    def _room_for_states(self, states: Mapping[Any, Any], stored: Mapping[Any, Any]) -> dict[Any, Any]:
        room: dict[Any, Any] = {}
        are_numbers = any(str(key).isdecimal() for key in stored)
        for key, entry in stored.items():
            own = self.own_key(key, are_numbers=are_numbers)
            if own is None:
                continue
            self.own_keys[key] = own
            parameter = self.layout.parameters.get(own)
            room[key] = self._maker(parameter).complete(states.get(own), entry, add_own=True)
        taken = set(self.own_keys.values())
        # What only the optimizer has is left for the planner to report.
        room.update({key: value for key, value in states.items() if key not in taken})
        return room

    def own_key(self, key: Any, *, are_numbers: bool) -> Any:
        """The key in the dict of what is stored under ``key``; None if there is no such parameter."""
        raise NotImplementedError

    def _maker(self, parameter: torch.Tensor | None) -> StateMaker:
        return StateMaker(parameter, self.layout.is_whole, self.layout.device)

    def check_positions(self) -> None:
        """Make sure that the groups that were loaded have the sizes of those of the optimizer."""
        members = [group["params"] for group in self.node["param_groups"]]
        check_sizes(members, self.before[1], allow_partial=False, key=".".join(map(str, self.path)))

    def undo(self) -> None:
        self.node["state"], self.node["param_groups"] = self.before


class PlainRoom(_Room):
    """A new optimizer's own state dict, as a plain dict that is loaded into: its parameters are not known.

    Tensors are made whole, on the host.
    """

    def __init__(self, path: tuple[Any, ...], node: dict[str, Any]) -> None:
        super().__init__(path, node, ParameterStates(parameters={}))

    def own_key(self, key: Any, *, are_numbers: bool) -> Any:
        if not are_numbers:
            return None
        return int(key) if str(key).isdecimal() else key

    def settle(self) -> None:
        states, groups = self.before
        if self.node["param_groups"] is not groups:
            self.check_positions()
            self.node["param_groups"] = [
                {**own, **saved} for own, saved in zip(groups, self.node["param_groups"], strict=True)
            ]
        if self.node["state"] is not states:
            states.update({self.own_keys.get(key, key): entry for key, entry in self.node["state"].items()})
            self.node["state"] = states


class NamedRoom(_Room):
    """A state dict by names, as ``get_optimizer_state_dict`` returns it."""

    def __init__(self, path: tuple[Any, ...], node: dict[str, Any]) -> None:
        super().__init__(path, node, node["state"])
        self.names = list(self.layout.parameters)

    def own_key(self, key: Any, *, are_numbers: bool) -> Any:
        if are_numbers and str(key).isdecimal():
            number = int(key)
            return self.names[number] if number < len(self.names) else None
        return key if key in self.layout.parameters else None

    def settle(self) -> None:
        members = [group.get("params", ()) for group in self.node["param_groups"]]
        if any(isinstance(number, int) for number in chain.from_iterable(members)):
            self.check_positions()
        loaded = self.node["state"]
        if loaded is not self.layout:
            self.layout.clear()
            self.layout.update({self.own_keys.get(key, key): value for key, value in loaded.items()})
            self.node["state"] = self.layout
        for group in self.node["param_groups"]:
            if isinstance(group, dict) and isinstance(group.get("params"), list):
                group["params"] = [
                    self.names[name] if isinstance(name, int) and name < len(self.names) else name
                    for name in group["params"]
                ]


class ObjectRoom(_Room):
    """The state dict of an optimizer, by numbers."""

    def __init__(
        self,
        path: tuple[Any, ...],
        node: dict[str, Any],
        owner: torch.optim.Optimizer,
        modules: list[torch.nn.Module],
        allow_partial: bool,
    ) -> None:
        parameters = list(chain.from_iterable(group["params"] for group in owner.param_groups))
        super().__init__(path, node, ParameterStates(parameters=dict(enumerate(parameters))))
        self.parameters, self.modules, self.allow_partial = parameters, modules, allow_partial
        self.own_names = [name for group in owner.param_groups for name in group.get("param_names", ())]

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of the parameters by number: the optimizer's own, or those in modules of the state."""
        if len(self.own_names) == len(self.parameters):
            return self.own_names
        names = _names_of_parameters(self.modules)
        return [names.get(id(parameter), "") for parameter in self.parameters]

    def own_key(self, key: Any, *, are_numbers: bool) -> Any:
        if not str(key).isdecimal():
            # Beside numbers it is something that the optimizer keeps for all parameters together.
            return key if are_numbers else self._numbers.get(key)
        # By name, what has a higher number now may still be one of the optimizer's parameters.
        return int(key) if self.own_names or int(key) < len(self.parameters) else None

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in reversed(list(enumerate(self.names))) if name}

    def settle(self) -> None:
        if self.node["param_groups"] is self.before[1]:
            return
        groups, numbers = assign_groups(
            self.node["param_groups"],
            self.before[1],
            lambda: self.names,
            has_own_names=len(self.own_names) == len(self.parameters),
            allow_partial=self.allow_partial,
            key=".".join(map(str, self.path)),
        )
        states = {}
        for key, value in self.node["state"].items():
            own = self.own_keys.get(key, key)
            number = numbers.get(own, own)
            if number is None:
                continue
            parameter = self.layout.parameters.get(number)
            states[number] = value if number == own else _in_layout_of(parameter, value)
        self.node["state"], self.node["param_groups"] = states, groups


class FlatRoom:
    """A whole state dict of an optimizer in the flattened form."""

    def __init__(self, path: tuple[Any, ...], node: ParameterStates) -> None:
        self.path, self.node = path, node
        self.added: list[str] = []

    def make(self, metadata: Metadata) -> None:
        below = "".join(f"{name}." for name in self.path)
        subclasses = stored_subclasses(metadata)
        for stored_key in metadata.state_dict_metadata:
            key = outermost_key(stored_key, subclasses)
            name = key.removeprefix(below)
            if not key.startswith(below) or name in self.node:
                continue
            parameter = self._parameter_of(name)
            if parameter is not None:
                path = subclasses.get(key)
                entry = metadata.state_dict_metadata[key] if path is None else stored_tree(metadata, path)
                maker = StateMaker(parameter, self.node.is_whole, self.node.device)
                self.node[name] = maker.complete(None, entry, add_own=False)
                self.added.append(name)

    def _parameter_of(self, key: str) -> torch.Tensor | None:
        kind, _, rest = key.partition(".")
        if kind not in ("state", "param_groups"):
            return None
        while rest:
            rest, _, _ = rest.rpartition(".")
            if rest in self.node.parameters:
                return self.node.parameters[rest]
        return None

    def settle(self) -> None:
        """Nothing: what was loaded stands where it belongs."""

    def undo(self) -> None:
        for name in self.added:
            del self.node[name]


def _in_layout_of(parameter: torch.Tensor | None, value: Any) -> Any:
    """State that was made for another parameter of the same optimizer."""
    if isinstance(value, dict):
        return {key: _in_layout_of(parameter, entry) for key, entry in value.items()}
    if isinstance(parameter, DTensor) and isinstance(value, DTensor) and value.shape == parameter.shape:
        return value.redistribute(parameter.device_mesh, parameter.placements)
    return value


def _names_of_parameters(modules: list[torch.nn.Module]) -> dict[int, str]:
    """The name of each parameter of some modules, by its ``id``."""
    names: dict[int, str] = {}
    for module in modules:
        for parameter, all_names in names_by_parameter(module, StateDictOptions()).items():
            names.setdefault(parameter, all_names[0])
    return names
