"""Room in a state dict of an optimizer in the flattened form."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast._engine.missing_state import StateMaker
from holdfast._model_state.flat_optimizer_state import GROUPS, STATE, flat_leaves, parameter_of, state_leaves
from holdfast._model_state.optimizer_kind import refuse_other_kind
from holdfast._parameter_states import ParameterStates
from holdfast._plan.flatten import flat_key


class FlatRoom:
    """A whole state dict of an optimizer, or of several, in the flattened form.

    Args:
        path: The way to it in the state.
        node: The dict.
        layout: Its parameters, and how to make tensors for them.
    """

    def __init__(self, path: tuple[Any, ...], node: dict[Any, Any], layout: ParameterStates) -> None:
        self.path, self.node, self.layout = path, node, layout
        self.before = dict(node)
        self.taken_out: dict[str, Any] = {}

    def make(self, stored: Any) -> None:
        """Make room for what the checkpoint has, flattened or not; as the rooms of nested state dicts do."""
        if not isinstance(stored, Mapping):
            return
        entries = {
            name: (parameter, entry)
            for name, entry in _leaves(stored)
            if (parameter := parameter_of(name, self.layout.parameters)) is not None
            and (isinstance(entry, Mapping) or name.partition(".")[2] != parameter)
        }
        states, options = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
        for name, (parameter, entry) in entries.items():
            kind = name.partition(".")[0]
            inner = name[len(kind) + len(parameter) + 2 :]
            of_kind = (states if kind == STATE else options).setdefault(parameter, {})
            of_kind.update({inner: entry} if inner else entry)
        distinct = {frozenset(of_parameter): of_parameter for of_parameter in options.values()}
        key = flat_key(self.path)
        refuse_other_kind(self.layout.optimizers, list(distinct.values()), states, key=key)
        for name, (parameter, entry) in entries.items():
            own = self.before.get(name)
            if isinstance(own, dict) or (name not in self.before and not self._is_in_a_dict(name)):
                maker = StateMaker(
                    self.layout.parameters[parameter], self.layout.is_whole, self.layout.device
                )
                self.node[name] = maker.complete(own, entry, add_own=True)
        self._take_out(entries, options)

    def _is_in_a_dict(self, name: str) -> bool:
        """Whether the optimizer has this in a dict that stays one; torch's helpers flatten every dict."""
        end = name.rfind(".")
        while end > 0 and not isinstance(self.before.get(name[:end]), dict):
            end = name.rfind(".", 0, end)
        return end > 0

    def _take_out(self, entries: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Take out options that the checkpoint does not have for a parameter: they keep their values."""
        for name in [name for name in self.node if name not in entries]:
            if name.startswith(f"{GROUPS}.") and parameter_of(name, self.layout.parameters) in options:
                self.taken_out[name] = self.node.pop(name)

    def member_keys(self) -> list[str]:
        """There are no lists of parameters to check: parameters have names."""
        return []

    def check(self, members: Sequence[Sequence[Any]]) -> None:
        """Nothing is left to check."""

    def settle(self) -> None:
        self.node.update(self.taken_out)

    def undo(self) -> None:
        self.node.clear()
        self.node.update(self.before)


def _leaves(stored: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """The entries of the flattened form of a stored state dict, whichever form it was stored in."""
    for key, value in stored.items():
        if key == STATE and isinstance(value, Mapping):
            for name, state in value.items():
                yield from state_leaves(name, state)
        else:
            yield from flat_leaves(str(key), value)
