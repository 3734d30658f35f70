"""Objects of a checkpoint back into values, without running any code that the checkpoint holds."""

import contextlib
import functools
import io
import pickle
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeAlias

import torch

from holdfast._contents.object_bytes import is_raw
from holdfast._objects.allowed import StandIn, find_allowed
from holdfast._objects.allowed_numpy import (
    ArrayName,
    RefusedError,
    check_array_state,
    check_dtype_state,
    is_numpy,
)
from holdfast._objects.object_streams import LoadedObject
from holdfast._objects.rebuild_tensors import (
    REBUILT,
    STORAGE_DTYPES,
    NamedStorage,
    NeedsTorchError,
    StorageName,
    TensorName,
    storage_of,
)
from holdfast._objects.torch_archive import check_records, pickle_record, read_storages
from holdfast.errors import IntegrityError, UnsafeMetadataError

_Globals: TypeAlias = Sequence[Callable[..., Any] | type]


def decode_object(
    key: str,
    stream: io.BytesIO,
    *,
    allow_pickle: bool = False,
    safe_globals: _Globals = (),
) -> Any:
    """The value that was stored under ``key``.

    Args:
        key: For messages.
        stream: What the storage read.
        allow_pickle: Unpickle freely.
        safe_globals: What the pickle may name besides data types.

    Raises:
        UnsafeMetadataError: The value needs something that is not allowed; nothing of it was run.
        IntegrityError: The bytes are not a stored object.
    """
    with explaining(key):
        if allow_pickle:
            if not isinstance(stream, LoadedObject):
                check_records(stream)
            return torch.load(stream, weights_only=False)
        if isinstance(stream, LoadedObject):
            # Bytes that we stored are the payload itself; anything else in our containers is a pickle.
            if is_raw(stream.head, stream.payload):
                return stream.payload
            pickled: bytes | None = bytes(stream.payload)
        else:
            pickled = pickle_record(stream)
        if pickled is None:
            return _load_by_torch(stream, safe_globals)
        try:
            return _unpickle(pickled, safe_globals, read_storages(stream))
        except NeedsTorchError:
            return _load_by_torch(stream, safe_globals)


def _unpickle(pickled: bytes, safe_globals: _Globals, storages: Callable[[str], bytearray]) -> Any:
    if not _may_take_memory(pickled):
        try:
            return _FastUnpickler(pickled, safe_globals).load()
        except _NeedsCareError:
            pass
    return CarefulUnpickler(pickled, safe_globals, storages).load()


def _may_take_memory(pickled: bytes) -> bool:
    """Whether a memo number might be in it that makes the fast unpickler take gigabytes for a table.

    May be wrong about what is text or bytes; then the slower one, which has no table, reads it.
    """
    return any(int.from_bytes(found[1], "little") > len(pickled) for found in _LONG_PUT.finditer(pickled))


_LONG_PUT = re.compile(rb"r(?=(.{4}))", re.DOTALL)


@contextlib.contextmanager
def explaining(key: str) -> Iterator[None]:
    """Turn every error into one that names the object."""
    try:
        yield
    except RefusedError as refused:
        raise UnsafeMetadataError(
            f"{key}: the checkpoint holds an object that needs {refused}, which was not run. If you trust "
            f"the checkpoint, pass safe_globals=[...] with it, or allow_pickle=True.",
            key=key,
            found=str(refused),
        ) from None
    except IntegrityError:
        raise
    except MemoryError as error:
        raise IntegrityError(f"{key}: the stored object asks for too much memory", key=key) from error
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise IntegrityError(f"{key}: the stored object cannot be read: {reason}", key=key) from error


def _load_by_torch(stream: io.BytesIO, safe_globals: _Globals) -> Any:
    check_records(stream)
    try:
        with torch.serialization.safe_globals(list(safe_globals)):
            return torch.load(stream, weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        reason = named or re.search(r"WeightsUnpickler error:\s*(.*)", str(error))
        what = reason[1] if reason else str(error).strip().splitlines()[0]
        if what.startswith("Unsupported operand"):
            raise ValueError(f"it is no pickle ({what})") from error
        raise RefusedError(what) from error


class _NeedsCareError(Exception):
    pass


_MAKES_TENSORS = ("torch._utils", "torch._tensor", "torch.storage", "torch.nested._internal.nested_tensor")
"""Modules of torch's whose functions make tensors. It is up to ``torch.load`` which of them it runs."""


_STAND_INS = (functools.partial, StandIn, ArrayName, StorageName, TensorName)
"""What a pickle gets instead of the classes and functions that it names."""


class _Rules:
    """The allow-list of both unpicklers; each is mixed with one of Python's."""

    def __init__(self, pickled: bytes, safe_globals: _Globals) -> None:
        super().__init__(io.BytesIO(pickled))  # type: ignore[call-arg]
        self.allowed = {(made.__module__, made.__qualname__): made for made in safe_globals}
        self._stand_ins: list[tuple[weakref.ref[Any], str]] = []

    def find_class(self, module: str, name: str) -> Any:
        # Protocol 2, which torch writes, has the names of Python 2.
        if module == "__builtin__":
            name = {"long": "int", "unicode": "str", "xrange": "range"}.get(name, name)
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        if (module, name) in self.allowed and (module, name) not in REBUILT:
            return self.allowed[module, name]
        found = self._find(module, name)
        if isinstance(found, _STAND_INS):
            self._stand_ins.append((weakref.ref(found), f"{module}.{name}"))
        return found

    def _find(self, module: str, name: str) -> Any:
        if module in _MAKES_TENSORS or name.endswith("Storage"):
            raise NeedsTorchError
        try:
            return find_allowed(module, name)
        except KeyError:
            raise RefusedError(f"{module}.{name}") from None

    def load(self) -> Any:
        value = super().load()  # type: ignore[misc]
        setattr(self, "memo", {})  # noqa: B010 - each of the two declares it in its own way
        # One that is still alive is a part of the value, in the place of what it stands for.
        for stand_in, name in self._stand_ins:
            if stand_in() is not None:
                raise RefusedError(name)
        return value


class _FastUnpickler(_Rules, pickle.Unpickler):
    """Nothing that it gives out can be changed by what the pickle does with it."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            found = super().find_class(module, name)
        except NeedsTorchError:
            raise _NeedsCareError from None
        if is_numpy(module, name) or _can_be_changed(found):
            raise _NeedsCareError
        return found

    def persistent_load(self, _: Any) -> Any:
        raise _NeedsCareError


_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8


def _can_be_changed(found: Any) -> bool:
    """Whether it is a class whose attributes can be set, which a pickle could do for the whole process."""
    return isinstance(found, type) and found.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE) == _HEAP_TYPE


class CarefulUnpickler(_Rules, pickle._Unpickler):  # noqa: SLF001 - the Python one can be looked into
    """Also gives out Python's classes, numpy's arrays and tensors: it checks every state that a pickle sets.

    Args:
        pickled: The pickle.
        safe_globals: What it may name besides data types.
        storages: Gives the bytes of a storage of the container, by its key.
    """

    def __init__(self, pickled: bytes, safe_globals: _Globals, storages: Callable[[str], bytearray]) -> None:
        super().__init__(pickled, safe_globals)
        self._read = storages
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._named: list[NamedStorage] = []

    def load(self) -> Any:
        value = super().load()
        if not all(storage.is_used for storage in self._named):
            raise NeedsTorchError  # a storage that is no tensor's
        return value

    def load_build(self) -> None:
        state, target = self.stack[-1], self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(target, type) or callable(target):
            raise RefusedError(f"to change {target!r}")
        # Whoever holds something of numpy's has imported it.
        np = sys.modules.get("numpy")
        if np is not None and isinstance(target, np.dtype):
            check_dtype_state(state)
        elif np is not None and isinstance(target, np.ndarray):
            check_array_state(state)
        pickle._Unpickler.load_build(self)  # type: ignore[attr-defined]  # noqa: SLF001

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}  # noqa: SLF001

    def _find(self, module: str, name: str) -> Any:
        if (module, name) in REBUILT:
            return functools.partial(REBUILT[module, name])
        if (module, name) in STORAGE_DTYPES:
            return StorageName(STORAGE_DTYPES[module, name])
        return TensorName() if (module, name) == ("torch", "Tensor") else super()._find(module, name)

    def persistent_load(self, name: Any) -> Any:
        try:
            word, kind, key, location, count = name
        except (TypeError, ValueError):
            raise NeedsTorchError from None
        if word != "storage" or not isinstance(kind, StorageName):
            raise NeedsTorchError
        self._named.append(NamedStorage(self._storage(kind, key, location, count), kind.dtype))
        return self._named[-1]

    def _storage(self, kind: StorageName, key: Any, location: Any, count: Any) -> torch.UntypedStorage:
        """The storage of a name."""
        if location != "cpu":
            raise NeedsTorchError
        if key not in self._storages:
            self._storages[key] = storage_of(self._read(key), kind, count)
        return self._storages[key]


class _RehearsingUnpickler(CarefulUnpickler):
    """Does everything but read the storages: they stay zeros, which take no memory until they are touched."""

    def __init__(self, pickled: bytes) -> None:
        super().__init__(pickled, (), lambda _: bytearray(self._nbytes))
        self._nbytes = 0

    def _find(self, module: str, name: str) -> Any:
        # Zeros are not the indices of a sparse tensor.
        is_sparse = name == "_rebuild_sparse_tensor"
        return (lambda *_: None) if is_sparse else super()._find(module, name)

    def _storage(self, kind: StorageName, key: Any, location: Any, count: Any) -> torch.UntypedStorage:
        self._nbytes = count * kind.itemsize
        return super()._storage(kind, key, location, count)


def rehearse(pickled: bytes) -> Exception | None:
    """Why a load will refuse a pickle that was just made, unless the caller allows it; None if it will not.

    A NeedsTorchError says that it is up to ``torch.load``.
    """
    try:
        _RehearsingUnpickler(pickled).load()
    except (RefusedError, NeedsTorchError) as refused:
        return refused
    except Exception as error:  # noqa: BLE001 - a load of it fails in the same way
        return RefusedError(f"free unpickling ({error})")
    return None
