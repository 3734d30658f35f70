"""Makes what a checkpoint has of an optimizer's state and the optimizer has not: memory, without values.

The tensors get the device of their parameter, and its layout, unless each rank had one of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parameter import is_lazy

from holdfast._engine.pickled_tensors import PickledRoom, PickledTensorMetadata
from holdfast._engine.rank_view import OwnTensorMetadata
from holdfast._tensors.chunks import global_shape, is_any_tensor
from holdfast._tensors.subclass_room import make_subclass
from holdfast._tensors.tensor_parts import TensorParts
from holdfast.metadata import TensorStorageMetadata


@dataclass(frozen=True)
class StateMaker:
    """Makes what is missing of the state of one parameter.

    Attributes:
        parameter: The parameter; None for values that belong to none.
        is_whole: Make whole tensors, whatever layout the parameter has.
        device: Where to make them; None for the parameter's device.
    """

    parameter: torch.Tensor | None
    is_whole: bool
    device: torch.device | None

    def complete(self, own: Any, stored: Any, *, add_own: bool) -> Any:
        """Copy the stored structure, with the optimizer's own values if it has them, and room for all others.

        Tensors are made without values; None stands for other values.

        Args:
            own: What the optimizer has.
            stored: What the checkpoint has, with the metadata of each value in its place.
            add_own: Add entries of dicts that only the optimizer has.
        """
        if isinstance(stored, Mapping) and not isinstance(stored, TensorParts):
            owns = own if isinstance(own, Mapping) else {}
            # Keys may be numbers here and text in the checkpoint.
            own_keys = {str(key): key for key in owns}
            completed = {}
            for key, entry in stored.items():
                own_key = own_keys.get(str(key), key)
                completed[own_key] = self.complete(owns.get(own_key), entry, add_own=add_own)
            return {**owns, **completed} if add_own else completed
        if isinstance(stored, list):
            owned = own if isinstance(own, list) else []
            return [
                self.complete(value, entry, add_own=add_own)
                for entry, value in zip(stored, chain(owned, repeat(None)), strict=False)
            ]
        if is_any_tensor(own):
            is_tensor = isinstance(stored, TensorParts | TensorStorageMetadata | PickledTensorMetadata)
            return own if is_tensor else None
        if isinstance(stored, TensorParts):
            return make_subclass(stored, *self._place())
        if isinstance(stored, TensorStorageMetadata):
            return self._make(stored)
        return PickledRoom(*self._place()) if isinstance(stored, PickledTensorMetadata) else own

    def _make(self, entry: TensorStorageMetadata) -> torch.Tensor:
        """A tensor without values. The random number generators are not used."""
        parameter, dtype = self.parameter, entry.properties.dtype
        if parameter is None or not len(entry.size):
            # A count of steps, which most optimizers keep on the host.
            return torch.empty(entry.size, dtype=dtype, device="cpu")
        has_its_shape = not is_lazy(parameter) and global_shape(parameter) == entry.size
        is_own = isinstance(entry, OwnTensorMetadata) and not (has_its_shape and entry.has_one_shape)
        if self.is_whole or is_lazy(parameter) or is_own:
            return torch.empty(entry.size, dtype=dtype, device=self.device or parameter.device)
        if has_its_shape:
            return torch.empty_like(parameter, dtype=dtype, device=self.device, requires_grad=False)
        made = torch.empty(entry.size, dtype=dtype, device=self.device or parameter.device)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            made = DTensor.from_local(made, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return made

    def _place(self) -> tuple[torch.Tensor | None, torch.device]:
        """The parameter whose layout a tensor gets, if it gets one, and the device."""
        parameter = self.parameter
        device = self.device or (torch.device("cpu") if parameter is None else parameter.device)
        return None if self.is_whole else parameter, device
