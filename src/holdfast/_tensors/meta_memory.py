"""Tensors on the meta device get memory: what shared a storage before shares it after."""

from collections.abc import Hashable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast._tensors.chunks import local_parts, with_memory
from holdfast.errors import UsageError


def alias_of(value: torch.Tensor) -> Hashable:
    """An identity of a meta tensor's elements: equal for two tensors that are the same part of one storage.

    A parameter and what ``state_dict`` gives for it are different objects with one alias. It is valid while
    either of them lives.
    """
    try:
        (part,) = local_parts(value)
        # There is no address to compare: a storage on the meta device has none.
        storage = part.untyped_storage()._cdata  # noqa: SLF001
    except (RuntimeError, NotImplementedError, ValueError):
        # A class without a storage of its own, or shards of which there may be several.
        return id(value)
    return storage, part.storage_offset(), part.shape, part.stride(), part.dtype


class MetaMemory:
    """Gives memory to tensors on the meta device, once for those that are aliases of each other.

    Args:
        device: Where; None for the device of the mesh of a DTensor, and for others the current accelerator,
            or the CPU if there is none.

    Raises:
        UsageError: The device is the meta device itself.
    """

    def __init__(self, device: torch.device | str | int | None = None) -> None:
        self._device = None if device is None else torch.device(device)
        if self._device is not None and self._device.type == "meta":
            raise UsageError("device='meta' has no memory to load into: name another device, or leave it out")
        self._made: dict[Hashable, Any] = {}

    def give(self, value: Any) -> Any:
        """A tensor like ``value``, with memory that is not initialized; see ``with_memory``.

        Raises:
            UsageError: This process cannot use the device.
        """
        if self._device is not None and not self._made:
            _check_device(self._device)
        which = (alias_of(value), type(value), value.requires_grad)
        if which not in self._made:
            self._made[which] = with_memory(value, self._device or _home_of(value))
        return self._made[which]


def _check_device(device: torch.device) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        # torch raises an AssertionError if it was built without CUDA.
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"device={str(device)!r}: this process cannot use that device ({reason}). Name another, or leave "
            "it out"
        ) from error


def _home_of(value: Any) -> torch.device:
    if isinstance(value, DTensor):
        return torch.device(value.device_mesh.device_type)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if accelerator is None else accelerator


def take_the_place(old: torch.Tensor, loaded: torch.Tensor) -> None:
    """Let ``old``, a tensor on the meta device, become ``loaded``, whose memory it shares from then on.

    It stays the same object, so that modules that tie it and optimizers go on holding it. It is a parameter
    if it was one, with its ``requires_grad`` and the attributes that somebody has set.

    Raises:
        RuntimeError: torch cannot exchange them, because of a weak reference or a graph of autograd.
    """
    new: Any = loaded.detach()
    if isinstance(old, torch.nn.Parameter):
        new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
        if type(old) is not type(new):
            new.__class__ = type(old)
    attributes = dict(vars(old))
    torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
    for name, value in attributes.items():
        vars(old).setdefault(name, value)
