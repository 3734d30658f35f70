"""Owns the pickle of a torch.save file: its state with tensors that have no memory, made by the allow-list.

Nothing that the pickle names is run. A tensor becomes one on the meta device, with the shape, strides and
offset that the file has; a value that needs a class which is not allowed becomes one that is refused when
somebody asks for it.
"""

import copy
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from holdfast._objects.allowed_numpy import RefusedError
from holdfast._objects.decode import CarefulUnpickler, explaining
from holdfast._objects.rebuild_tensors import (
    REBUILT,
    NamedStorage,
    NeedsTorchError,
    StorageName,
    TensorName,
    storage_over,
    with_lazy_bits,
)
from holdfast.errors import IntegrityError

_REBUILD_TENSOR = REBUILT["torch._utils", "_rebuild_tensor_v2"]
_FROM_TYPE = ("torch._tensor", "_rebuild_from_type_v2")
_META = ("torch._utils", "_rebuild_meta_tensor_no_storage")
# These look at the elements when they are made.
_NEED_ELEMENTS = {
    ("torch._utils", "_rebuild_sparse_tensor"),
    ("torch._utils", "_rebuild_qtensor"),
}


class StorageRecord(NamedTuple):
    """A storage of the file.

    Attributes:
        key: The name of its record, without the folder ``data``.
        nbytes: How many bytes the pickle says that it has.
    """

    key: str
    nbytes: int


class _Unbuilt(NamedTuple):
    """A tensor that cannot be made before its elements are read."""

    make: Callable[..., torch.Tensor]
    arguments: Any


class _OpaqueName:
    """Stands for a class or function that the pickle names and must not get."""

    def __init__(self, name: str, known: dict[int, Any]) -> None:
        self.name = name
        self._known = known
        known[id(self)] = self
        # Pickles make instances by calling __new__ of what they take for a class.
        setattr(self, "__new__", lambda *_, **__: self())  # noqa: B010

    def __call__(self, *_: Any, **__: Any) -> "_Opaque":
        made = _Opaque(self.name)
        self._known[id(made)] = made
        return made


class _Opaque:
    """Stands for an object of a class, or from a function, that is not allowed. It ignores every change."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass

    def add(self, item: Any) -> None:
        pass


class SavedState:
    """The state in the pickle of a torch.save file.

    Args:
        pickled: The pickle.
        path: The file, for messages.
        safe_globals: What the pickle may name besides data types.
        allow_pickle: Import and call whatever it names.

    Attributes:
        root: The value that was saved. Its tensors are on the meta device.

    Raises:
        IntegrityError: It is not the pickle of a file that torch.save writes.
    """

    def __init__(
        self,
        pickled: bytes,
        *,
        path: str,
        safe_globals: Sequence[Callable[..., Any] | type] = (),
        allow_pickle: bool = False,
    ) -> None:
        with explaining(path), torch.device("meta"):
            unpickler = _MetaUnpickler(pickled, safe_globals, allow_pickle=allow_pickle)
            try:
                self.root: Any = unpickler.load()
            except NeedsTorchError:
                raise IntegrityError(f"{path}: has a storage that is no tensor's", path=path) from None
        self._known = unpickler.known
        self._storages = unpickler.storages

    @property
    def refused(self) -> str | None:
        """The name that the saved value itself needs and must not have; None if it is another value."""
        return self.root.name if isinstance(self.root, _Opaque | _OpaqueName) else None

    def storage_of(self, value: Any) -> StorageRecord | None:
        """The storage of the file that a plain tensor lies in; None for any other value."""
        if not isinstance(value, torch.Tensor) or id(value) not in self._known:
            return None
        return self._storages[value.untyped_storage()._cdata]  # noqa: SLF001 - there is no public identity

    def with_elements(self, key: str, value: Any, read: Callable[[StorageRecord], bytearray]) -> Any:
        """A copy of a value of the state in which tensors have their elements.

        Args:
            key: The value's key, for messages.
            value: The value.
            read: Gives the bytes of a storage.

        Raises:
            UnsafeMetadataError: It holds something that is not allowed.
        """
        with explaining(key):
            return copy.deepcopy(value, _Elements(self._known, self._storages, read))


class _MetaUnpickler(CarefulUnpickler):
    """Makes tensors on the meta device, over storages on it.

    Attributes:
        known: What is not complete, by its id: tensors and storages without elements, and what was refused.
        storages: The records of the storages, by the identity of what stands for each in memory.
    """

    def __init__(self, pickled: bytes, safe_globals: Sequence[Any], *, allow_pickle: bool) -> None:
        super().__init__(pickled, safe_globals, lambda _: bytearray())
        self._allow_pickle = allow_pickle
        self._by_key: dict[str, tuple[StorageRecord, torch.UntypedStorage]] = {}
        self.known: dict[int, Any] = {}
        self.storages: dict[int, StorageRecord] = {}

    def load_build(self) -> None:
        if self._allow_pickle:
            pickle._Unpickler.load_build(self)  # type: ignore[attr-defined]  # noqa: SLF001
        else:
            super().load_build()

    dispatch = {**CarefulUnpickler.dispatch, b"b"[0]: load_build}  # noqa: RUF012 - as in Python's

    def _find(self, module: str, name: str) -> Any:
        if (module, name) == _FROM_TYPE:
            return partial(self._from_type)
        if (module, name) in _NEED_ELEMENTS:
            return partial(self._later, REBUILT[module, name])
        if (module, name) in REBUILT and (module, name) != _META:
            return partial(self._tensor, REBUILT[module, name])
        try:
            return super()._find(module, name)
        except (RefusedError, NeedsTorchError):
            if self._allow_pickle:
                return pickle._Unpickler.find_class(self, module, name)  # noqa: SLF001
            return _OpaqueName(f"{module}.{name}", self.known)

    def _tensor(self, make: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        return cast("torch.Tensor", self._keep(make(*arguments)))

    def _later(self, make: Callable[..., torch.Tensor], *arguments: Any) -> _Unbuilt:
        _mark_used(arguments)
        return cast("_Unbuilt", self._keep(_Unbuilt(make, arguments)))

    def _from_type(self, make: Any, kind: Any, arguments: Any, _: Any = None) -> Any:
        """A tensor with attributes, which are left out, or of a class that is not known."""
        is_plain = isinstance(make, partial) and make.args == (_REBUILD_TENSOR,)
        if is_plain and isinstance(kind, TensorName):
            return make(*arguments)
        _mark_used(arguments)
        name = kind.name if isinstance(kind, _OpaqueName) else ".".join(_FROM_TYPE)
        return self._keep(_Opaque(name))

    def _keep(self, value: Any) -> Any:
        self.known[id(value)] = value
        return value

    def persistent_load(self, name: Any) -> Any:
        return self._keep(super().persistent_load(name))

    def _storage(self, kind: StorageName, key: Any, _location: Any, count: Any) -> torch.UntypedStorage:
        if type(key) is not str:
            raise NeedsTorchError
        if type(count) is not int or count < 0:
            raise TypeError(f"a storage of {count} elements")
        record = StorageRecord(key, count * kind.itemsize)
        if key not in self._by_key:
            memory = torch.empty(record.nbytes, dtype=torch.uint8, device="meta").untyped_storage()
            self._by_key[key] = record, memory
            self.storages[memory._cdata] = record  # noqa: SLF001
        known, memory = self._by_key[key]
        if known != record:
            raise TypeError(f"the storage {key} has {known.nbytes} and {record.nbytes} bytes")
        return memory


def _mark_used(arguments: Any) -> None:
    """Note that the storages among the arguments of a call belong to a tensor."""
    for argument in arguments if isinstance(arguments, tuple) else ():
        if isinstance(argument, NamedStorage):
            argument.is_used = True


class _Elements(dict[int, Any]):
    """The memo of a deep copy that gives what has its elements in place of what has not."""

    def __init__(
        self,
        known: dict[int, Any],
        storages: dict[int, StorageRecord],
        read: Callable[[StorageRecord], bytearray],
    ) -> None:
        super().__init__()
        self._known = known
        self._storages = storages
        self._read = read
        self._memory: dict[int, torch.UntypedStorage] = {}

    def get(self, identity: int, default: Any = None) -> Any:
        if identity not in self and identity in self._known:
            self[identity] = self._complete(self._known[identity])
        return super().get(identity, default)

    def _complete(self, value: Any) -> Any:
        if isinstance(value, _Opaque | _OpaqueName):
            raise RefusedError(value.name)
        if isinstance(value, _Unbuilt):
            return value.make(*copy.deepcopy(value.arguments, self))
        if isinstance(value, NamedStorage):
            return NamedStorage(self._read_memory(value.memory), value.dtype)
        assert isinstance(value, torch.Tensor)
        storage = self._read_memory(value.untyped_storage())
        place = value.storage_offset(), value.shape, value.stride()
        tensor = torch.empty(0, dtype=value.dtype, device="cpu").set_(storage, *place)
        tensor = with_lazy_bits(tensor, conj=value.is_conj(), neg=value.is_neg())
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(tensor, value.requires_grad)
        return tensor.requires_grad_() if value.requires_grad else tensor

    def _read_memory(self, memory: torch.UntypedStorage) -> torch.UntypedStorage:
        identity = memory._cdata  # noqa: SLF001
        if identity not in self._memory:
            self._memory[identity] = storage_over(self._read(self._storages[identity]))
        return self._memory[identity]
