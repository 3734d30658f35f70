"""Plain tensors inside other values: from the storages and numbers that a pickle names, checked."""

from dataclasses import dataclass
from typing import Any

import torch

from holdfast._format.dtypes import TYPED_STORAGES

__all__ = ["STORAGE_DTYPES", "StorageName", "rebuild_tensor", "storage_of"]

STORAGE_DTYPES: dict[tuple[str, str], torch.dtype | None] = {
    **{("torch", name): getattr(torch, dtype) for dtype, name in TYPED_STORAGES.items()},
    ("torch.storage", "UntypedStorage"): None,
}
"""The dtype that each storage class of torch's implies; none for bytes whose dtype stands elsewhere."""


@dataclass(frozen=True)
class StorageName:
    """The name of a storage class, which cannot be called."""

    dtype: torch.dtype | None


def storage_of(content: bytearray, kind: StorageName, count: Any) -> torch.UntypedStorage:
    """The storage with these bytes, if they are as many as declared."""
    itemsize = 1 if kind.dtype is None else kind.dtype.itemsize
    if type(count) is not int or count * itemsize != len(content):
        raise TypeError(f"a storage of {count} elements has {len(content)} bytes")
    if not content:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()


def rebuild_tensor(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, *rest: Any
) -> torch.Tensor:
    """What ``torch._utils._rebuild_tensor_v2`` and ``_v3`` make, for elements that lie in the storage."""
    memory, dtype = storage
    if dtype is None:
        # The arguments after the hooks: the dtype, and then what only unusual tensors have.
        dtype = rest[1] if len(rest) > 1 else None
        rest = (rest[0], *rest[2:])
    if not isinstance(dtype, torch.dtype) or (len(rest) > 1 and rest[1]):
        raise TypeError("a plain tensor was expected")
    numbers = (offset, *size, *stride)
    if len(size) != len(stride) or not all(type(number) is int and number >= 0 for number in numbers):
        raise TypeError("a tensor with impossible numbers")
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if 0 not in size and (last + 1) * dtype.itemsize > memory.nbytes():
        raise TypeError("a tensor reaches outside its storage")
    tensor = torch.empty(0, dtype=dtype).set_(memory, offset, tuple(size), tuple(stride))
    return tensor.requires_grad_() if requires_grad is True else tensor
