"""Room for what a checkpoint has of an optimizer and the optimizer does not have yet.

An optimizer makes its state in its first step. In a new process there is nothing to load momenta into: what
is missing is made from the checkpoint's metadata, with the layout and on the device of its parameter.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from holdfast._engine.optimizer_groups import assign_groups
from holdfast._engine.stateful_objects import OpenedState, entries_of
from holdfast._model_state.parameter_names import names_by_parameter
from holdfast._model_state.state_dict_options import StateDictOptions
from holdfast._parameter_states import ParameterStates
from holdfast._plan.stored_tree import stored_subclasses, stored_tree
from holdfast._tensors.chunks import global_shape, is_any_tensor
from holdfast._tensors.subclass_room import make_subclass
from holdfast._tensors.tensor_parts import TensorParts
from holdfast.metadata import Metadata, TensorStorageMetadata


class OptimizerRooms:
    """The optimizers of a state that is loaded: objects, and state dicts of ``get_optimizer_state_dict``.

    Args:
        opened: The state, with objects replaced by their state.
        found: These objects.
        allow_partial: Whether parameters may be added to the groups that were saved.
    """

    def __init__(
        self, opened: dict[Any, Any], found: list[OpenedState], *, allow_partial: bool = False
    ) -> None:
        self._modules = [inner.owner for inner in found if isinstance(inner.owner, torch.nn.Module)]
        self._owners = {id(inner.opened): inner.owner for inner in found}
        self._allow_partial = allow_partial
        self._rooms: list[_ObjectRoom | _NamedRoom | _FlatRoom] = []
        self._find(opened, ())

    def _find(self, node: Any, path: tuple[Any, ...]) -> None:
        if isinstance(node, ParameterStates):
            self._rooms.append(_FlatRoom(path, node))
            return
        owner = self._owners.get(id(node))
        if isinstance(node, dict) and isinstance(node.get("param_groups"), list):
            states = node.get("state")
            if isinstance(owner, torch.optim.Optimizer) and isinstance(states, dict):
                self._rooms.append(_ObjectRoom(path, node, owner, self._modules, self._allow_partial))
                return
            if isinstance(states, ParameterStates):
                self._rooms.append(_NamedRoom(path, node))
                return
        if isinstance(owner, torch.nn.Module):
            return
        for key, value in entries_of(node):
            if not isinstance(value, torch.Tensor) and isinstance(value, Mapping | list):
                self._find(value, (*path, key))

    def make(self, metadata: Metadata) -> None:
        """Add what only the checkpoint has: tensors without values, and None for other values."""
        for room in self._rooms:
            room.make(metadata)

    def settle(self) -> None:
        """After the load: put what was loaded into the form of each state dict.

        Raises:
            PlanError: The groups of the checkpoint are not those of the optimizer.
        """
        for room in self._rooms:
            room.settle()

    def undo(self) -> None:
        """After a load that failed: take the room away again."""
        for room in self._rooms:
            room.undo()


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
                _merged(groups[n] if n < len(groups) else None, group, self._make_for(None), add_own=False)
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
            room[key] = _merged(states.get(own), entry, self._make_for(parameter), add_own=True)
        taken = set(self.own_keys.values())
        # What only the optimizer has is left for the planner to report.
        room.update({key: value for key, value in states.items() if key not in taken})
        return room

    def own_key(self, key: Any, *, are_numbers: bool) -> Any:
        """The key in the dict of what is stored under ``key``; None if there is no such parameter."""
        raise NotImplementedError

    def _make_for(self, parameter: torch.Tensor | None) -> "_Maker":
        return _Maker(parameter, self.layout.is_whole, self.layout.device)

    def undo(self) -> None:
        self.node["state"], self.node["param_groups"] = self.before


class _NamedRoom(_Room):
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


class _ObjectRoom(_Room):
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
        return int(key) if int(key) < len(self.parameters) else None

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
            parameter = self.layout.parameters.get(number)
            states[number] = value if number == own else _in_layout_of(parameter, value)
        self.node["state"], self.node["param_groups"] = states, groups


class _FlatRoom:
    """A whole state dict of an optimizer in the flattened form."""

    def __init__(self, path: tuple[Any, ...], node: ParameterStates) -> None:
        self.path, self.node = path, node
        self.added: list[str] = []

    def make(self, metadata: Metadata) -> None:
        below = "".join(f"{name}." for name in self.path)
        subclasses = stored_subclasses(metadata)
        for stored_key in metadata.state_dict_metadata:
            key = _outermost(stored_key, subclasses)
            name = key.removeprefix(below)
            if not key.startswith(below) or name in self.node:
                continue
            parameter = self._parameter_of(name)
            if parameter is not None:
                path = subclasses.get(key)
                entry = metadata.state_dict_metadata[key] if path is None else stored_tree(metadata, path)
                maker = _Maker(parameter, self.node.is_whole, self.node.device)
                self.node[name] = _merged(None, entry, maker, add_own=False)
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


@dataclass(frozen=True)
class _Maker:
    """Makes tensors for the state of one parameter.

    Attributes:
        parameter: The parameter; None for values that belong to none.
        is_whole: Make whole tensors, whatever layout the parameter has.
        device: Where to make them; None for the parameter's device.
    """

    parameter: torch.Tensor | None
    is_whole: bool
    device: torch.device | None

    def make(self, entry: TensorStorageMetadata) -> torch.Tensor:
        """A tensor without values. The random number generators are not used."""
        parameter, dtype = self.parameter, entry.properties.dtype
        if parameter is None or not len(entry.size):
            # A count of steps, which most optimizers keep on the host.
            return torch.empty(entry.size, dtype=dtype)
        if self.is_whole:
            return torch.empty(entry.size, dtype=dtype, device=self.device or parameter.device)
        if global_shape(parameter) == entry.size:
            return torch.empty_like(parameter, dtype=dtype, device=self.device, requires_grad=False)
        made = torch.empty(entry.size, dtype=dtype, device=self.device or parameter.device)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            made = DTensor.from_local(made, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return made

    def make_subclass(self, stored: TensorParts) -> torch.Tensor:
        """A tensor of the class that the checkpoint has the parts of, without values."""
        parameter = self.parameter
        device = self.device or (torch.device("cpu") if parameter is None else parameter.device)
        return make_subclass(stored, None if self.is_whole else parameter, device)


def _merged(own: Any, stored: Any, maker: _Maker, *, add_own: bool) -> Any:
    """What is stored, in containers of its own: the optimizer's values where it has them, else room.

    Args:
        own: What the optimizer has.
        stored: What the checkpoint has, with the metadata of each value in its place.
        maker: Makes the tensors.
        add_own: Add entries of dicts that only the optimizer has.
    """
    if isinstance(stored, TensorParts):
        return own if is_any_tensor(own) else maker.make_subclass(stored)
    if isinstance(stored, Mapping):
        owns = own if isinstance(own, Mapping) else {}
        by_name = {str(key): key for key in owns}
        merged = {
            by_name.get(str(key), key): _merged(
                owns.get(by_name.get(str(key), key)), entry, maker, add_own=add_own
            )
            for key, entry in stored.items()
        }
        return {**owns, **merged} if add_own else merged
    if isinstance(stored, list):
        owned = own if isinstance(own, list) else []
        return [
            _merged(owned[n] if n < len(owned) else None, entry, maker, add_own=add_own)
            for n, entry in enumerate(stored)
        ]
    if isinstance(stored, TensorStorageMetadata):
        return own if is_any_tensor(own) else maker.make(stored)
    return None if is_any_tensor(own) else own


def _outermost(key: str, subclasses: Mapping[str, Any]) -> str:
    """The key of the tensor that a stored value is a part of; the key itself if it is none."""
    if subclasses:
        for end in (number for number, letter in enumerate(key) if letter == "."):
            if key[:end] in subclasses:
                return key[:end]
    return key


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
