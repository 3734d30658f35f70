"""Objects of a checkpoint back into values, without running any code that the checkpoint holds."""

import contextlib
import functools
import io
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from holdfast._objects.allowed import find_allowed
from holdfast._objects.container import pickle_record, read_storages, refuse_compressed
from holdfast._objects.numpy_stand_ins import NotPlainError, check_array_state, check_dtype_state, is_numpy
from holdfast._objects.stored import LoadedObject
from holdfast._objects.tensors import STORAGE_DTYPES, StorageName, rebuild_tensor, storage_of
from holdfast.errors import IntegrityError, UnsafeMetadataError

__all__ = ["decode_object", "is_bytearray"]

# How a pickle of nothing but bytes begins; their length follows.
_BYTES, _BYTEARRAY = b"\x80\x04\x8e", b"\x80\x05\x96"


def decode_object(
    key: str,
    stream: io.BytesIO,
    *,
    allow_pickle: bool = False,
    safe_globals: Sequence[Callable[..., Any] | type] = (),
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
    with _explaining(key):
        if allow_pickle:
            return torch.load(stream, weights_only=False)
        if isinstance(stream, LoadedObject):
            # Bytes that we stored are the payload itself; anything else in our containers is a pickle.
            size = len(stream.payload).to_bytes(8, "little")
            if stream.head.endswith(_BYTES + size):
                return stream.payload
            if stream.head.endswith(_BYTEARRAY + size):
                return stream.payload
            pickled: bytes | None = bytes(stream.payload)
        else:
            pickled = pickle_record(stream)
        if pickled is None:
            return _load_by_torch(stream, safe_globals)
        try:
            return _unpickle(pickled, safe_globals)
        except _HoldsTensorsError:
            pass
        try:
            return _TensorUnpickler(pickled, safe_globals, read_storages(stream)).load()
        except _HoldsTensorsError:
            # Not plain tensors in the host's memory: torch knows more kinds.
            return _load_by_torch(stream, safe_globals)


def is_bytearray(head: bytes) -> bool:
    """Whether a container of ours, which begins like this, has the content of a bytearray in it."""
    return head[-11:-8] == _BYTEARRAY


def _unpickle(pickled: bytes, safe_globals: Sequence[Callable[..., Any] | type]) -> Any:
    if not _may_take_memory(pickled):
        try:
            return _Unpickler(pickled, safe_globals).load()
        except _NeedsCareError:
            pass
    return _CarefulUnpickler(pickled, safe_globals).load()


def _may_take_memory(pickled: bytes) -> bool:
    """Whether a memo number might be in it that makes the fast unpickler take gigabytes for a table.

    May be wrong about what is text or bytes; then the slower one, which has no table, reads it.
    """
    return any(int.from_bytes(found[1], "little") > len(pickled) for found in _LONG_PUT.finditer(pickled))


_LONG_PUT = re.compile(rb"r(?=(.{4}))", re.DOTALL)


@contextlib.contextmanager
def _explaining(key: str) -> Iterator[None]:
    """Say which object it was, whatever goes wrong."""
    try:
        yield
    except (_NotAllowedError, NotPlainError) as refused:
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
        raise IntegrityError(f"{key}: the stored object cannot be read: {error}", key=key) from error


def _load_by_torch(stream: io.BytesIO, safe_globals: Sequence[Callable[..., Any] | type]) -> Any:
    refuse_compressed(stream)
    try:
        with torch.serialization.safe_globals(list(safe_globals)):
            return torch.load(stream, weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise _NotAllowedError(named[1] if named else str(error).strip().splitlines()[0]) from error


class _NotAllowedError(Exception):
    """Names what was asked for."""


class _HoldsTensorsError(Exception):
    pass


class _NeedsCareError(Exception):
    pass


class _Rules:
    """What both unpicklers allow."""

    allowed: dict[tuple[str, str], Any]
    is_careful = False

    def find_class(self, module: str, name: str) -> Any:
        found = self._find(module, name)
        if not self.is_careful and (is_numpy(module, name) or _can_be_changed(found)):
            raise _NeedsCareError
        return found

    def _find(self, module: str, name: str) -> Any:
        # Protocol 2, which torch writes, has the names of Python 2.
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        if (module, name) in self.allowed:
            return self.allowed[module, name]
        if module in ("torch._utils", "torch._tensor", "torch.storage") or name.endswith("Storage"):
            raise _HoldsTensorsError
        try:
            return find_allowed(module, name)
        except KeyError:
            raise _NotAllowedError(f"{module}.{name}") from None

    def persistent_load(self, _: Any) -> Any:
        raise _HoldsTensorsError


class _Unpickler(_Rules, pickle.Unpickler):
    """The fast one: nothing that it gives out can be changed by what the pickle does with it."""

    def __init__(self, pickled: bytes, safe_globals: Sequence[Callable[..., Any] | type]) -> None:
        super().__init__(io.BytesIO(pickled))
        self.allowed = {(made.__module__, made.__qualname__): made for made in safe_globals}


class _CarefulUnpickler(_Rules, pickle._Unpickler):  # noqa: SLF001 - the Python one can be looked into
    """Also gives out classes written in Python, and numpy's: it checks every state that a pickle sets."""

    is_careful = True

    def __init__(self, pickled: bytes, safe_globals: Sequence[Callable[..., Any] | type]) -> None:
        super().__init__(io.BytesIO(pickled))
        self.allowed = {(made.__module__, made.__qualname__): made for made in safe_globals}

    def load_build(self) -> None:
        state, target = self.stack[-1], self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(target, type) or callable(target):
            raise _NotAllowedError(f"to change {target!r}")
        # Whoever holds something of numpy's has imported it.
        np = sys.modules.get("numpy")
        if np is not None and isinstance(target, np.dtype):
            check_dtype_state(state)
        elif np is not None and isinstance(target, np.ndarray):
            check_array_state(state)
        pickle._Unpickler.load_build(self)  # type: ignore[attr-defined]  # noqa: SLF001

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}  # noqa: SLF001


_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8


def _can_be_changed(found: Any) -> bool:
    """Whether it is a class whose attributes can be set, which a pickle could do for the whole process."""
    return isinstance(found, type) and found.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE) == _HEAP_TYPE


class _TensorUnpickler(_CarefulUnpickler):
    """Also makes plain tensors of the host's memory, from the storages that the container holds."""

    def __init__(
        self,
        pickled: bytes,
        safe_globals: Sequence[Callable[..., Any] | type],
        storages: Callable[[str], bytearray],
    ) -> None:
        super().__init__(pickled, safe_globals)
        self._read = storages
        self._storages: dict[str, torch.UntypedStorage] = {}

    def _find(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return functools.partial(rebuild_tensor)
        if (module, name) in STORAGE_DTYPES:
            return StorageName(STORAGE_DTYPES[module, name])
        return super()._find(module, name)

    def persistent_load(self, name: Any) -> Any:
        try:
            word, kind, key, location, count = name
        except (TypeError, ValueError):
            raise _HoldsTensorsError from None
        if word != "storage" or not isinstance(kind, StorageName) or location != "cpu":
            raise _HoldsTensorsError
        if key not in self._storages:
            self._storages[key] = storage_of(self._read(key), kind, count)
        return self._storages[key], kind.dtype
