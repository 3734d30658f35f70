"""Room in a state dict of an optimizer in the flattened form."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast._engine.missing_state import StateMaker
from holdfast._model_state.flat_optimizer_state import GROUPS, STATE, parameter_of
from holdfast._model_state.optimizer_kind import refuse_other_kind
from holdfast._parameter_states import ParameterStates
from holdfast._plan.flatten import flat_key
from holdfast._tensors.tensor_parts import TensorParts


class FlatRoom:
    """A whole state dict of an optimizer in the flattened form."""

    def __init__(self, path: tuple[Any, ...], node: ParameterStates) -> None:
        self.path, self.node = path, node
        self.added: list[str] = []
        self.taken_out: dict[str, Any] = {}

    def make(self, stored: Any) -> None:
        """Make room for what the checkpoint has, flattened or not; as the rooms of nested state dicts do."""
        if not isinstance(stored, Mapping):
            return
        entries = {
            name: (parameter, entry)
            for name, entry in _leaves(stored)
            if (parameter := parameter_of(name, self.node.parameters)) is not None
        }
        states, options = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
        for name, (parameter, entry) in entries.items():
            kind = name.partition(".")[0]
            inner = name[len(kind) + len(parameter) + 2 :]
            (states if kind == STATE else options).setdefault(parameter, {})[inner] = entry
        distinct = {frozenset(of_parameter): of_parameter for of_parameter in options.values()}
        key = flat_key(self.path)
        refuse_other_kind(self.node.optimizers, list(distinct.values()), states, key=key)
        for name, (parameter, entry) in entries.items():
            if name not in self.node:
                maker = StateMaker(self.node.parameters[parameter], self.node.is_whole, self.node.device)
                self.node[name] = maker.complete(None, entry, add_own=False)
                self.added.append(name)
        self._take_out([name for name in self.node if name not in entries], options)

    def _take_out(self, names: Sequence[str], options: Mapping[str, Any]) -> None:
        """Take out options that the checkpoint does not have for a parameter: they keep their values."""
        for name in names:
            if name.startswith(f"{GROUPS}.") and parameter_of(name, self.node.parameters) in options:
                self.taken_out[name] = self.node.pop(name)

    def member_keys(self) -> list[str]:
        """Nothing: parameters have names."""
        return []

    def check(self, members: Sequence[Sequence[Any]]) -> None:
        """Nothing is left to check."""

    def settle(self) -> None:
        self.node.update(self.taken_out)

    def undo(self) -> None:
        for name in self.added:
            del self.node[name]
        self.node.update(self.taken_out)


def _leaves(stored: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """What stands in nested dicts, by keys joined with dots; lists and the parts of a tensor stay whole."""
    for key, value in stored.items():
        if isinstance(value, Mapping) and not isinstance(value, TensorParts):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
