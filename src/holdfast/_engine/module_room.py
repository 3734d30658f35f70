"""Room for the extra state of modules, and for lazy parameters, in the form that the checkpoint has.

A module gets its extra state handed over by ``load_state_dict``: it is not filled in place. So it need not
have the form yet that it had when it was saved. A lazy module takes the shape of what it loads.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from holdfast._engine.missing_state import StateMaker
from holdfast._tensors.chunks import is_any_tensor
from holdfast.metadata import TensorStorageMetadata

_EXTRA_STATE = "_extra_state"
"""How the keys end under which modules have what their ``get_extra_state`` returns."""


def takes_any_form(key: Any, value: Any) -> bool:
    """Whether an entry of a state dict is extra state of a module, or a parameter without a shape yet."""
    if isinstance(key, str) and (key == _EXTRA_STATE or key.endswith(f".{_EXTRA_STATE}")):
        return True
    return isinstance(value, torch.Tensor) and is_lazy(value)


class ModuleRoom:
    """One entry of a module's state dict that takes the form that the checkpoint has.

    Args:
        path: The way to it in the state.
        node: The state dict.
    """

    def __init__(self, path: tuple[Any, ...], node: dict[Any, Any]) -> None:
        self.path, self.node = path, node
        self.before = node[path[-1]]

    def make(self, stored: Any) -> None:
        """Make room for what the checkpoint has.

        Args:
            stored: That, with the metadata of each value in its place; None for nothing.
        """
        if stored is None:
            return
        own = self.before
        if isinstance(own, torch.Tensor) and is_lazy(own):
            if isinstance(stored, TensorStorageMetadata):
                self.node[self.path[-1]] = torch.empty(stored.size, dtype=own.dtype, device=own.device)
            return
        self.node[self.path[-1]] = _MAKER.complete(_fitting(own, stored), stored, add_own=False)

    def member_keys(self) -> list[str]:
        """There are no lists of parameters to check."""
        return []

    def check(self, members: list[Any]) -> None:
        """There is nothing to check."""

    def settle(self) -> None:
        """The module takes what was loaded as it is."""

    def undo(self) -> None:
        """After a load that failed: put back what was there."""
        self.node[self.path[-1]] = self.before


_MAKER = StateMaker(parameter=None, is_whole=False, device=None)


def _fitting(own: Any, stored: Any) -> Any:
    """The module's own value, with None for each tensor that the stored one does not fit."""
    if isinstance(own, Mapping) and isinstance(stored, Mapping):
        by_text = {str(key): one for key, one in stored.items()}
        return {key: _fitting(value, by_text.get(str(key))) for key, value in own.items()}
    if isinstance(own, list) and isinstance(stored, list):
        return [_fitting(value, one) for value, one in zip(own, stored, strict=False)]
    if isinstance(own, Mapping | list):
        return None
    if not is_any_tensor(own) or not isinstance(stored, TensorStorageMetadata):
        return own
    return own if own.shape == stored.size and own.dtype == stored.properties.dtype else None
