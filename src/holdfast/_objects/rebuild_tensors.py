"""Tensors inside other values: rebuilt from the storages and numbers that a pickle names, once checked.

Each function has the arguments of the one in torch that the pickle names, and raises TypeError for numbers
that do not fit together.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast._format.dtypes import TYPED_STORAGES
from holdfast._geometry import reach_of

STORAGE_DTYPES: dict[tuple[str, str], torch.dtype | None] = {
    **{("torch", name): getattr(torch, dtype) for dtype, name in TYPED_STORAGES.items()},
    ("torch", "QInt8Storage"): torch.qint8,
    ("torch", "QUInt8Storage"): torch.quint8,
    ("torch", "QInt32Storage"): torch.qint32,
    ("torch.storage", "UntypedStorage"): None,
}
"""The dtype that each storage class of torch's implies; none for bytes whose dtype stands elsewhere."""


class NeedsTorchError(Exception):
    """The pickle holds a kind of tensor, or other class of torch's, that only torch.load may rebuild."""


@dataclass(frozen=True)
class StorageName:
    """The name of a storage class, which cannot be called."""

    dtype: torch.dtype | None

    @property
    def itemsize(self) -> int:
        """The bytes of an element; 1 for a storage that counts bytes."""
        return 1 if self.dtype is None else self.dtype.itemsize


class NamedStorage:
    """A storage of the container, for one of the functions below."""

    def __init__(self, memory: torch.UntypedStorage, dtype: torch.dtype | None) -> None:
        self.memory = memory
        self.dtype = dtype
        self.is_used = False


class TensorName:
    """The name of the class Tensor, which cannot be called."""


def storage_of(content: bytearray, kind: StorageName, count: Any) -> torch.UntypedStorage:
    """The storage with these bytes, if they are as many as declared."""
    if type(count) is not int or count * kind.itemsize != len(content):
        raise TypeError(f"a storage of {count} elements has {len(content)} bytes")
    return storage_over(content)


def storage_over(content: bytearray) -> torch.UntypedStorage:
    """The storage over these bytes, which are not copied."""
    if not content:
        return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
    return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()


def _check_numbers(size: Sequence[Any], stride: Sequence[Any], offset: Any = 0) -> None:
    numbers = (offset, *size, *stride)
    if len(size) != len(stride) or not all(type(number) is int and number >= 0 for number in numbers):
        raise TypeError("a tensor with impossible numbers")


def _rebuild_tensor(
    storage: NamedStorage, offset: Any, size: Any, stride: Any, requires_grad: Any, *rest: Any
) -> torch.Tensor:
    memory, dtype, storage.is_used = storage.memory, storage.dtype, True
    if dtype is None:
        # The arguments after the hooks: the dtype, and then what only unusual tensors have.
        dtype = rest[1] if len(rest) > 1 else None
        rest = (rest[0], *rest[2:])
    views = rest[1] if len(rest) > 1 else {}
    if not isinstance(dtype, torch.dtype) or not isinstance(views, dict) or views.keys() - {"conj", "neg"}:
        raise TypeError("a plain tensor was expected")
    _check_numbers(size, stride, offset)
    if 0 not in size and (offset + reach_of(size, stride)) * dtype.itemsize > memory.nbytes():
        raise TypeError("a tensor reaches outside its storage")
    tensor = torch.empty(0, dtype=dtype, device=memory.device).set_(
        memory, offset, tuple(size), tuple(stride)
    )
    tensor = with_lazy_bits(tensor, conj=views.get("conj") is True, neg=views.get("neg") is True)
    return tensor.requires_grad_() if requires_grad is True else tensor


def with_lazy_bits(tensor: torch.Tensor, *, conj: bool, neg: bool) -> torch.Tensor:
    """A view of a tensor whose elements stand for their conjugates, their negatives, or both."""
    if conj:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if neg else tensor  # noqa: SLF001 - there is no other way to make one


def _rebuild_parameter(data: Any, requires_grad: Any, _: Any) -> torch.nn.Parameter:
    if not isinstance(data, torch.Tensor):
        raise TypeError("a tensor was expected")
    return torch.nn.Parameter(data.detach(), requires_grad is True)


def _rebuild_buffer(make: Any, kind: Any, args: Any, marks: Any) -> torch.Tensor:
    """A tensor with attributes: only those of ``torch.nn.Buffer`` are known to be harmless."""
    if (
        not isinstance(make, functools.partial)
        or make.func is not _rebuild_tensor
        or not isinstance(kind, TensorName)
        or not isinstance(marks, dict)
        or marks.keys() - {"_is_buffer", "persistent"}
    ):
        raise NeedsTorchError
    tensor = _rebuild_tensor(*args)
    for name, is_set in marks.items():
        setattr(tensor, name, is_set is True)
    return tensor


def _rebuild_sparse(layout: Any, parts: Any) -> torch.Tensor:
    if layout is torch.sparse_coo:
        indices, values, size, *is_coalesced = parts
        return torch.sparse_coo_tensor(
            indices,
            values,
            tuple(size),
            device=values.device,
            check_invariants=True,
            is_coalesced=is_coalesced == [True],
        )
    compressed, plain, values, size = parts
    return torch.sparse_compressed_tensor(
        compressed, plain, values, tuple(size), layout=layout, device=values.device, check_invariants=True
    )


def _rebuild_quantized(
    storage: NamedStorage, offset: Any, size: Any, stride: Any, quantizer: Any, *_: Any
) -> torch.Tensor:
    memory, dtype, storage.is_used = storage.memory, storage.dtype, True
    _check_numbers(size, stride, offset)
    numel = math.prod(size)
    reached = offset + reach_of(size, stride)
    if dtype is None or (numel and max(reached, numel) * dtype.itemsize > memory.nbytes()):
        raise TypeError("a tensor reaches outside its storage")
    scheme, scale, zero, *axis = quantizer
    if scheme is torch.per_tensor_affine:
        tensor = torch._empty_affine_quantized(size, scale=scale, zero_point=zero, dtype=dtype)  # noqa: SLF001
    else:
        if not 0 <= axis[0] < len(size) or not scale.numel() == zero.numel() == size[axis[0]]:
            raise TypeError("a tensor with impossible scales")
        tensor = torch._empty_per_channel_affine_quantized(  # noqa: SLF001
            size, scales=scale, zero_points=zero, axis=axis[0], dtype=dtype
        )
    return tensor.set_(memory, offset, tuple(size), tuple(stride))


def _rebuild_meta(dtype: Any, size: Any, stride: Any, requires_grad: Any) -> torch.Tensor:
    _check_numbers(size, stride)
    return torch.empty_strided(
        tuple(size), tuple(stride), dtype=dtype, device="meta", requires_grad=requires_grad is True
    )


REBUILT: dict[tuple[str, str], Callable[..., torch.Tensor]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_buffer,
    ("torch._utils", "_rebuild_sparse_tensor"): _rebuild_sparse,
    ("torch._utils", "_rebuild_qtensor"): _rebuild_quantized,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _rebuild_meta,
}
"""What stands for each function of torch's that a pickle may name to make a tensor."""
