"""Room for what a checkpoint has of the optimizers and modules of a state, and these do not have yet.

An optimizer makes its state in its first step, so in a new process there is nothing to load momenta into. The
extra state of a module may have another form before its first step. A load makes what is missing from the
checkpoint's metadata, and takes it away again if it fails.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch

from holdfast._engine.flat_optimizer_room import FlatRoom
from holdfast._engine.module_room import ModuleRoom, takes_any_form
from holdfast._engine.optimizer_groups import listed_groups
from holdfast._engine.optimizer_state_room import NamedRoom, ObjectRoom, PlainRoom
from holdfast._engine.stateful_objects import OpenedState, entries_of
from holdfast._model_state.flat_optimizer_state import GROUPS, STATE
from holdfast._parameter_states import ParameterStates, joined_layout
from holdfast._plan.stored_tree import stored_trees
from holdfast.metadata import Metadata


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
        self._rooms: list[ObjectRoom | NamedRoom | PlainRoom | FlatRoom | ModuleRoom] = []
        self._find(opened, ())

    def _find(self, node: Any, path: tuple[Any, ...]) -> None:
        if isinstance(node, ParameterStates):
            self._rooms.append(FlatRoom(path, node, node))
            return
        layout = joined_layout(node) if _looks_flattened(node) else None
        if layout is not None:
            self._rooms.append(FlatRoom(path, node, layout))
            return
        owner = self._owners.get(id(node))
        groups = node.get("param_groups") if isinstance(node, dict) else None
        if isinstance(groups, list | dict):
            states = node.get("state")
            # First, because an optimizer's own state_dict() may have been replaced by one with names.
            if isinstance(states, ParameterStates):
                self._rooms.append(NamedRoom(path, node, allow_partial=self._allow_partial))
                return
            if isinstance(owner, torch.optim.Optimizer) and isinstance(states, dict):
                if not _has_names(groups):
                    self._rooms.append(ObjectRoom(path, node, owner, self._modules, self._allow_partial))
                return
            if isinstance(states, dict) and _lacks_states(groups, states):
                self._rooms.append(PlainRoom(path, node))
                return
        if isinstance(node, dict):
            rooms = (
                ModuleRoom((*path, key), node) for key, value in node.items() if takes_any_form(key, value)
            )
            self._rooms.extend(rooms)
        if isinstance(owner, torch.nn.Module):
            return
        for key, value in entries_of(node):
            if not isinstance(value, torch.Tensor) and isinstance(value, Mapping | list):
                self._find(value, (*path, key))

    def make(self, metadata: Metadata) -> None:
        """Add what only the checkpoint has: tensors without values, and None for other values.

        Raises:
            PlanError: The checkpoint has an optimizer of another kind.
        """
        stored = stored_trees(metadata, [room.path for room in self._rooms])
        for room in self._rooms:
            room.make(stored.get(tuple(map(str, room.path))))

    def check(self, read: Callable[[list[str]], dict[str, Any]]) -> None:
        """Before anything is loaded: raise if the groups of the checkpoint are not those of an optimizer.

        Args:
            read: Reads some objects of the checkpoint; leaves out what it cannot read.

        Raises:
            PlanError: They are not.
        """
        keys = [room.member_keys() for room in self._rooms]
        found = read(list(chain.from_iterable(keys))) if any(keys) else {}
        for room, of_room in zip(self._rooms, keys, strict=True):
            members = [found[key] for key in of_room if isinstance(found.get(key), list)]
            if of_room and len(members) == len(of_room):
                room.check(members)

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


def _looks_flattened(node: Any) -> bool:
    """Whether a dict may be made of flattened state dicts of optimizers, as its first key shows."""
    key = next(iter(node), None) if type(node) in (dict, OrderedDict) else None
    return isinstance(key, str) and key.startswith((f"{GROUPS}.", f"{STATE}."))


def _has_names(groups: Any) -> bool:
    """Whether groups have parameters by name, as torch's helpers make it: these have made room already."""
    return any(
        isinstance(name, str)
        for group in listed_groups(groups)
        if isinstance(group, Mapping)
        for name in group.get("params", ())
    )


def _lacks_states(groups: Any, states: Mapping[Any, Any]) -> bool:
    """Whether this is ``Optimizer.state_dict()``, and some of its parameters, by number, have no state."""
    if not isinstance(groups, list) or not groups:
        return False
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        return False
    numbers = [number for group in groups for number in group["params"]]
    are_numbers = all(type(number) is int for number in numbers)
    return are_numbers and not (numbers and states.keys() >= set(numbers))
