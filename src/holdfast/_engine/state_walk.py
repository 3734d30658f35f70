"""A nested state with some of its values replaced: containers on the way are copied, the rest is shared."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from holdfast._contents.nested_state import Path
from holdfast._engine.stateful_objects import copy_with, entries_of
from holdfast._plan.flatten import refusing_endless
from holdfast._tensors.tensor_parts import TensorParts


class StateWalk:
    """Copies the containers on the way to values of one kind, and puts something else in their place.

    Args:
        kind: The class of the values.
        may_replace: Whether values of a subclass of ``kind`` may have to be replaced.
        replace: Returns what stands for such a value, or the value itself. It is given the path, too.
    """

    def __init__(
        self, kind: type, may_replace: Callable[[type], bool], replace: Callable[[Any, Path], Any]
    ) -> None:
        self._kind, self._may_replace, self._replace = kind, may_replace, replace
        # Asking whether a class is a Mapping takes longer than all else for a leaf.
        self._leaves: set[type] = {torch.Tensor, torch.nn.Parameter}
        self._copies: list[tuple[Any, Any]] = []

    def start(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state, or a copy of it if something in it was replaced.

        Raises:
            UsageError: The state contains itself.
        """
        with refusing_endless():
            opened: dict[str, Any] = self.open(state, ())
        return opened

    def open(self, value: Any, path: Path) -> Any:
        """As ``start``, for the part of a state at a path."""
        if isinstance(value, self._kind):
            return self._replace(value, path)
        if not self._may_hold(type(value)):
            return value
        # By the classes of all entries at once: 100,000 tensors take 2 milliseconds.
        kinds = set(map(type, value.values() if isinstance(value, Mapping) else value))
        if kinds <= self._leaves or not {kind for kind in kinds if self._may_hold(kind)}:
            return value
        changed, leaves = {}, self._leaves
        for key, entry in entries_of(value):
            kind = type(entry)
            # The second is what an optimizer has for each of 30,000 parameters: a microsecond each.
            if kind in leaves or (kind is dict and leaves.issuperset(map(type, entry.values()))):
                continue
            opened = self.open(entry, (*path, key))
            if opened is not entry:
                changed[key] = opened
        if not changed:
            return value
        copied = copy_with(value, changed)
        self._copies.append((value, copied))
        return copied

    def _may_hold(self, kind: type) -> bool:
        if kind in self._leaves:
            return False
        is_container = issubclass(kind, Mapping | list) and not issubclass(kind, TensorParts)
        if is_container or (issubclass(kind, self._kind) and self._may_replace(kind)):
            return True
        self._leaves.add(kind)
        return False

    def put_back(self, loaded: Callable[[Any, Any], Any]) -> None:
        """After a load into what ``open`` returned: put what was loaded into the original containers.

        Args:
            loaded: Called with what was at a place before, None if nothing was, and with what is there in the
                copy. Returns what belongs there.
        """
        copies = {id(copied) for _, copied in self._copies}
        for original, copied in self._copies:
            for key, value in entries_of(copied):
                if id(value) in copies:
                    continue
                is_new = isinstance(original, Mapping) and key not in original
                before = None if is_new else original[key]
                now = loaded(before, value)
                if is_new or before is not now:
                    original[key] = now
