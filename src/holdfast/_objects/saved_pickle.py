"""Owns the pickle of a torch.save file that is being written, and which storages follow it."""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast._format.dtypes import DTYPES, UNTYPED_STORAGE
from holdfast._geometry import row_major_strides, volume
from holdfast.errors import PlanError

# What torch.save uses, and what weights_only=True reads.
_PROTOCOL = 2


@dataclass(eq=False)
class LaterTensor:
    """A tensor whose elements come after the pickle, in row-major order.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        requires_grad: Whether it gets a gradient.
        storage: Equal for tensors that share their elements.
        origin: Where the caller finds the elements.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    storage: Any
    origin: Any = None

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return volume(self.shape) * self.dtype.itemsize


@dataclass(eq=False)
class _LaterStorage:
    """The storage of such a tensor, as the pickle names it."""

    tensor: LaterTensor


@dataclass
class PickledState:
    """A state as a pickle, and the storages that it names, in the order of their numbers.

    Attributes:
        pickled: The pickle.
        storages: Tensors whose elements are yet to come, and storages that are in memory.
    """

    pickled: bytes
    storages: list[LaterTensor | torch.UntypedStorage] = field(default_factory=list)


def pickle_state(state: Any) -> PickledState:
    """Pickle a state as ``torch.save`` does.

    Raises:
        PlanError: A value of it cannot be pickled.
    """
    stream = io.BytesIO()
    pickler = _StatePickler(stream)
    try:
        pickler.dump(state)
    except Exception as error:
        raise PlanError(f"the state holds something that cannot be pickled: {error}") from error
    return PickledState(stream.getvalue(), pickler.storages)


class _StatePickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, _PROTOCOL)
        self.storages: list[LaterTensor | torch.UntypedStorage] = []
        self._numbers: dict[Any, str] = {}

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, LaterTensor):
            return NotImplemented
        is_untyped = DTYPES[str(obj.dtype)[6:]].storage == UNTYPED_STORAGE
        rebuild: Callable[..., Any] = (
            torch._utils._rebuild_tensor_v3 if is_untyped else torch._utils._rebuild_tensor_v2  # noqa: SLF001
        )
        facts: Any = (
            _LaterStorage(obj),
            0,
            obj.shape,
            row_major_strides(obj.shape),
            obj.requires_grad,
            OrderedDict(),
        )
        return rebuild, (*facts, obj.dtype) if is_untyped else facts

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _LaterStorage):
            tensor = obj.tensor
            name = DTYPES[str(tensor.dtype)[6:]].storage
            kind: Any = torch.storage.UntypedStorage if name == UNTYPED_STORAGE else getattr(torch, str(name))
            count = tensor.nbytes if name == UNTYPED_STORAGE else volume(tensor.shape)
            return "storage", kind, self._number(("later", tensor.storage), tensor), "cpu", count
        untyped: Any
        if isinstance(obj, torch.storage.TypedStorage):
            typed: Any = obj
            untyped = typed._untyped_storage  # noqa: SLF001 - as torch.save does
            kind, count = getattr(torch, typed._pickle_storage_type()), typed._size()  # noqa: SLF001
        elif isinstance(obj, torch.UntypedStorage):
            untyped, kind, count = obj, torch.storage.UntypedStorage, obj.nbytes()
        else:
            return None
        return "storage", kind, self._number(("here", untyped._cdata), untyped.cpu()), "cpu", count  # noqa: SLF001

    def _number(self, identity: Any, storage: LaterTensor | torch.UntypedStorage) -> str:
        if identity not in self._numbers:
            self._numbers[identity] = str(len(self.storages))
            self.storages.append(storage)
        return self._numbers[identity]
