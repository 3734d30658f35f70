"""Room in one state dict of an optimizer, in each of its nested forms: by number, by name, and plain."""

import functools
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast._engine.missing_state import StateMaker
from holdfast._engine.optimizer_groups import assign_groups, check_sizes, listed_groups
from holdfast._model_state.optimizer_kind import refuse_other_kind, refuse_other_options
from holdfast._model_state.parameter_names import ParameterNames
from holdfast._model_state.state_dict_options import StateDictOptions
from holdfast._parameter_states import ParameterStates
from holdfast._plan.flatten import flat_key


class _Room:
    """One optimizer: a dict with ``state`` and ``param_groups``.

    Args:
        path: The way to it in the state.
        node: The dict.
        layout: The parameters, by the keys that the dict uses, and how to make tensors for them.
    """

    def __init__(self, path: tuple[Any, ...], node: dict[str, Any], layout: ParameterStates) -> None:
        self.path, self.node, self.layout = path, node, layout
        self.key = flat_key(path)
        self.before = (node["state"], node["param_groups"])
        self.optimizers = layout.optimizers
        self.own_keys: dict[Any, Any] = {}
        # Whether the checkpoint has parameters by number; None if it has no state to tell by.
        self.are_numbers: bool | None = None

    def make(self, stored: Any) -> None:
        """Make room for what the checkpoint has of this optimizer.

        Args:
            stored: That, as a nested state with the metadata of each value in its place; None for nothing.

        Raises:
            PlanError: It is the state of another kind of optimizer.
        """
        if not isinstance(stored, Mapping):
            return
        states, groups = self.before
        of_states, of_groups = stored.get("state"), stored.get("param_groups")
        listed = listed_groups(of_groups)
        if not all(isinstance(group, Mapping) for group in listed):
            listed, of_groups = [], None
        if isinstance(of_states, Mapping):
            self.are_numbers = any(str(key).isdecimal() for key in of_states) if of_states else None
        self.refuse_other_kind(listed, of_states if isinstance(of_states, Mapping) else {})
        if isinstance(of_states, Mapping):
            self.node["state"] = self._room_for_states(states, of_states)
        # An option that the checkpoint does not have keeps its value: older versions had fewer.
        complete = functools.partial(self._maker(None).complete, add_own=False)
        if isinstance(of_groups, list):
            own = chain(listed_groups(groups), repeat(None))
            self.node["param_groups"] = [
                complete(mine, group) for mine, group in zip(own, of_groups, strict=False)
            ]
        elif isinstance(of_groups, Mapping):
            named = groups if isinstance(groups, Mapping) else {}
            self.node["param_groups"] = {
                name: complete(named.get(name), group) for name, group in of_groups.items()
            }

    def _room_for_states(self, states: Mapping[Any, Any], stored: Mapping[Any, Any]) -> dict[Any, Any]:
        room: dict[Any, Any] = {}
        for key, entry in stored.items():
            own = self.own_key(key, are_numbers=bool(self.are_numbers))
            if own is None:
                continue
            self.own_keys[key] = own
            parameter = self.layout.parameters.get(own)
            room[key] = self._maker(parameter).complete(states.get(own), entry, add_own=True)
        taken = set(self.own_keys.values())
        # What only the optimizer has is left for the planner to report.
        room.update({key: value for key, value in states.items() if key not in taken})
        return room

    def member_keys(self) -> list[str]:
        """The flat keys of the lists of parameters that ``check`` must know, if it can fail; else nothing."""
        groups = self.node["param_groups"]
        if groups is self.before[1] or not isinstance(groups, list) or self.are_numbers is False:
            return []
        return [f"{self.key}.param_groups.{n}.params".removeprefix(".") for n in range(len(groups))]

    def check(self, members: Sequence[Sequence[Any]]) -> None:
        """Before anything is read: make sure that the groups have the sizes of those of the optimizer.

        Args:
            members: For each key of ``member_keys`` what the checkpoint has there.

        Raises:
            PlanError: Parameters are matched by their positions, and the groups have other sizes.
        """
        if not any(isinstance(name, str) for name in chain.from_iterable(members)):
            self.check_positions([list(of_group) for of_group in members], is_early=True)

    def own_key(self, key: Any, *, are_numbers: bool) -> Any:
        """The key in the dict of what is stored under ``key``; None if there is no such parameter."""
        raise NotImplementedError

    def refuse_other_kind(self, groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Any]) -> None:
        """Raise if what was saved is the state of another kind of optimizer."""
        refuse_other_kind(self.optimizers, groups, states, key=self.key)

    def _maker(self, parameter: torch.Tensor | None) -> StateMaker:
        return StateMaker(parameter, self.layout.is_whole, self.layout.device)

    def check_positions(self, members: list[list[Any]], *, is_early: bool = False) -> None:
        """Make sure that the groups that were saved have the sizes of those of the optimizer."""
        check_sizes(
            members, listed_groups(self.before[1]), allow_partial=False, key=self.key, is_early=is_early
        )

    def loaded_groups(self) -> list[dict[str, Any]]:
        """The groups that were loaded, or those of before if there were none."""
        return listed_groups(self.node["param_groups"])

    def undo(self) -> None:
        self.node["state"], self.node["param_groups"] = self.before


class PlainRoom(_Room):
    """An optimizer's own state dict, as a plain dict that is loaded into: its parameters are not known.

    Tensors are made whole, on the host.
    """

    def __init__(self, path: tuple[Any, ...], node: dict[str, Any]) -> None:
        super().__init__(path, node, ParameterStates(parameters={}))

    def own_key(self, key: Any, *, are_numbers: bool) -> Any:
        if not are_numbers:
            return None
        return int(key) if str(key).isdecimal() else key

    def refuse_other_kind(self, groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Any]) -> None:
        refuse_other_options(self.before[1], groups, states, key=self.key)

    def settle(self) -> None:
        states, groups = self.before
        if self.node["param_groups"] is not groups:
            loaded = self.loaded_groups()
            self.check_positions([group["params"] for group in loaded])
            self.node["param_groups"] = [{**own, **saved} for own, saved in zip(groups, loaded, strict=True)]
        if self.node["state"] is not states:
            states.update({self.own_keys.get(key, key): entry for key, entry in self.node["state"].items()})
            self.node["state"] = states


class NamedRoom(_Room):
    """A state dict by names, as ``get_optimizer_state_dict`` returns it."""

    def __init__(self, path: tuple[Any, ...], node: dict[str, Any], *, allow_partial: bool) -> None:
        super().__init__(path, node, node["state"])
        self.allow_partial = allow_partial
        self.names = list(self.layout.parameters)

    def own_key(self, key: Any, *, are_numbers: bool) -> Any:
        if are_numbers and str(key).isdecimal():
            number = int(key)
            return self.names[number] if number < len(self.names) else None
        return key if key in self.layout.parameters else None

    def settle(self) -> None:
        groups = self.loaded_groups()
        members = [group.get("params", ()) for group in groups]
        if any(isinstance(number, int) for number in chain.from_iterable(members)):
            self.check_positions([list(of_group) for of_group in members])
        loaded = self.node["state"]
        if loaded is not self.layout:
            self.layout.clear()
            self.layout.update({self.own_keys.get(key, key): value for key, value in loaded.items()})
            self.node["state"] = self.layout
        for group in groups:
            if isinstance(group.get("params"), list):
                group["params"] = [
                    self.names[name] if isinstance(name, int) and name < len(self.names) else name
                    for name in group["params"]
                ]
        self._list_all(groups)
        named = self.node["param_groups"]
        if isinstance(named, dict) and isinstance(self.before[1], dict):
            named.update({f"added@{number}": groups[number] for number in range(len(named), len(groups))})
        else:
            self.node["param_groups"] = groups

    def _list_all(self, groups: list[dict[str, Any]]) -> None:
        """List every parameter of the optimizer that belongs there in a group.

        Ranks that hold other parameters save other lists of the same group. On another number of ranks, a
        load gives the list of rank 0: it is completed with the parameters whose state was loaded. With
        ``allow_partial``, parameters that were added since come to the others of their group, or into one
        with the options that they have.
        """
        place_of = {name: number for number, group in enumerate(groups) for name in group.get("params", ())}
        loaded = set(self.own_keys.values())
        for number, own in enumerate(listed_groups(self.before[1])):
            rest = [name for name in own["params"] if name not in place_of]
            of_others = [name for name in rest if name in loaded]
            if not self.allow_partial:
                rest = of_others
            places = [place_of[name] for name in own["params"] if name in place_of]
            if of_others and number < len(groups):
                places.append(number)
            if rest and places:
                groups[places[0]]["params"] = [*groups[places[0]].get("params", ()), *rest]
            elif rest:
                groups.append({**own, "params": rest})


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
        self.optimizers = [owner]
        self.own_names = [name for group in owner.param_groups for name in group.get("param_names", ())]

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of the parameters by number: the optimizer's own, or those in modules of the state."""
        if len(self.own_names) == len(self.parameters):
            return self.own_names
        names = _names_of_parameters(self.modules)
        return [names.get(parameter, "") for parameter in self.parameters]

    def own_key(self, key: Any, *, are_numbers: bool) -> Any:
        if not str(key).isdecimal():
            # Beside numbers it is something that the optimizer keeps for all parameters together.
            return key if are_numbers else self._numbers.get(key)
        # By name, what has a higher number now may still be one of the optimizer's parameters.
        return int(key) if self.own_names or int(key) < len(self.parameters) else None

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in reversed(list(enumerate(self.names))) if name}

    def member_keys(self) -> list[str]:
        has_names = all("param_names" in group for group in self.loaded_groups())
        return [] if has_names and self.own_names else super().member_keys()

    def check_positions(self, members: list[list[Any]], *, is_early: bool = False) -> None:
        check_sizes(
            members, self.before[1], allow_partial=self.allow_partial, key=self.key, is_early=is_early
        )

    def settle(self) -> None:
        if self.node["param_groups"] is self.before[1]:
            return
        groups, numbers = assign_groups(
            self.loaded_groups(),
            self.before[1],
            lambda: self.names,
            has_own_names=len(self.own_names) == len(self.parameters),
            allow_partial=self.allow_partial,
            key=self.key,
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


def _in_layout_of(parameter: torch.Tensor | None, value: Any) -> Any:
    """State that was made for another parameter of the same optimizer."""
    if isinstance(value, dict):
        return {key: _in_layout_of(parameter, entry) for key, entry in value.items()}
    if isinstance(parameter, DTensor) and isinstance(value, DTensor) and value.shape == parameter.shape:
        return value.redistribute(parameter.device_mesh, parameter.placements)
    return value


def _names_of_parameters(modules: list[torch.nn.Module]) -> dict[torch.Tensor, str]:
    """The name of each parameter of some modules; the first module that has it counts."""
    names: dict[torch.Tensor, str] = {}
    for module in reversed(modules):
        names |= ParameterNames(module, StateDictOptions()).first
    return names
