"""The values that are handed to ``load_state_dict`` of a model, each under the model's own key."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from holdfast._model_state.parameter_names import ModelNames
from holdfast._model_state.whole_tensors import copied, fill, shared_out
from holdfast._tensors.meta_memory import MetaMemory, take_the_place


class ValuesToLoad:
    """The values that are handed to ``load_state_dict``, by the keys of the model.

    Whole values go into sharded tensors directly, one after the other, so that no second copy of the model is
    ever there. A tensor on the meta device gets memory; tied ones get the same.

    Attributes:
        values: What to load, by key.
        unexpected: The name that the caller used for each key that the model has not.
        assign: Whether tensors of the model are replaced instead of filled.
        names: The names of the model.
        device: The device of the model's tensors; None if they have none.
    """

    def __init__(
        self, names: ModelNames, targets: dict[str, Any], device: torch.device | None, *, assign: bool
    ) -> None:
        self.values: OrderedDict[str, Any] = OrderedDict()
        self._keys = {name: key for key in targets if (name := names.name_of(key)) != key}
        self.unexpected: dict[str, str] = {}
        self.assign = assign
        self.names = names
        self.device = device
        self._targets = targets
        self._made: dict[int, torch.Tensor] = {}

    def key_for(self, name: str) -> str:
        """The key under which to load what the caller calls ``name``, which may be the key itself."""
        found = self._keys.get(name)
        if found is None and name in self._targets:
            return name
        return self.names.key_of(name) if found is None else found

    def take(self, name: str, value: Any) -> None:
        """Load ``value``, which stays the caller's."""
        key = self.key_for(name)
        target = self._targets.get(key)
        is_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        into_shards = isinstance(target, DTensor) and is_whole
        if is_whole and self.fits(key, value.shape) and (into_shards or self.assign):
            value = self.placed(key, value)
        self.load(name, key, value)

    def load(self, name: str, key: str, value: Any) -> None:
        """Load ``value`` under ``key``, which the caller calls ``name``."""
        self.values[key] = value
        if key not in self._targets:
            self.unexpected[key] = name

    def give_memory(self, state: Mapping[str, Any]) -> None:
        """Give memory to tensors on the meta device that are filled: torch fills nothing there, and warns.

        They stay the objects that they are, so that optimizers go on holding them.
        """
        memories: dict[torch.device | None, MetaMemory] = {}
        if not any(isinstance(one, torch.Tensor) and one.is_meta for one in self._targets.values()):
            return
        for name, value in state.items():
            key = self.key_for(name)
            target = self._targets.get(key)
            if not isinstance(target, torch.Tensor) or not target.is_meta:
                continue
            if isinstance(value, torch.Tensor) and not value.is_meta and self.fits(key, value.shape):
                device = None if isinstance(target, DTensor) else value.device
                memory = memories.setdefault(device, MetaMemory(device))
                try:
                    take_the_place(target, memory.give(target))
                except RuntimeError as error:
                    raise RuntimeError(
                        f"{name} is on the meta device, and torch cannot give it memory: {error}. Call "
                        "model.to_empty(device=...) first."
                    ) from error

    def leave_alone(self, name: str) -> None:
        """Let the model keep what it has under a name, if it has anything and there is nothing to load."""
        key = self.key_for(name)
        if key in self._targets:
            self.values.setdefault(key, self._targets[key])

    def has(self, key: str) -> bool:
        """Whether the model has an entry of that key."""
        return key in self._targets

    def fits(self, key: str, shape: torch.Size) -> bool:
        """Whether the model has a tensor of that key and shape."""
        target = self._targets.get(key)
        return isinstance(target, torch.Tensor) and not is_lazy(target) and target.shape == shape

    def placed(self, key: str, whole: torch.Tensor) -> torch.Tensor:
        """The model's own tensor, filled, or the one that takes its place if it has no memory."""
        target: torch.Tensor = self._targets[key]
        if not target.is_meta:
            fill(target, whole)
            return target
        if id(target) not in self._made:
            made = self._with_memory(target, whole)
            if isinstance(target, nn.Parameter):
                made = nn.Parameter(made, requires_grad=target.requires_grad)
            self._made[id(target)] = made
        return self._made[id(target)]

    def _with_memory(self, target: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        if isinstance(target, DTensor):
            kind = target.device_mesh.device_type
            device = self.device if self.device is not None else torch.device(kind)
            return shared_out(whole, target, device)
        return copied(whole, self.device)
