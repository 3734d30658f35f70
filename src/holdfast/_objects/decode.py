"""Objects of a checkpoint back into values, without running any code that the checkpoint holds."""

import contextlib
import io
import pickle
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from holdfast._objects.allowed import classes_for_torch, find_allowed, is_numpy
from holdfast._objects.stored import LoadedObject
from holdfast.errors import IntegrityError, UnsafeMetadataError

__all__ = ["decode_object", "is_bytearray", "unpickle_data"]

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
            pickled = _pickle_record(stream)
        if pickled is None:
            return _load_by_torch(stream, safe_globals)
        try:
            return _unpickle(pickled, safe_globals)
        except _HoldsTensorsError:
            return _load_by_torch(stream, safe_globals)


def is_bytearray(head: bytes) -> bool:
    """Whether a container of ours, which begins like this, has the content of a bytearray in it."""
    return head[-11:-8] == _BYTEARRAY


def unpickle_data(pickled: bytes, name: str, *, allow_pickle: bool = False) -> Any:
    """Read a pickle of data types; ``name`` says in messages what it is."""
    with _explaining(name):
        return pickle.loads(pickled) if allow_pickle else _unpickle(pickled, ())


def _unpickle(pickled: bytes, safe_globals: Sequence[Callable[..., Any] | type]) -> Any:
    allowed = {(g.__module__, g.__qualname__): g for g in safe_globals}
    try:
        return _Unpickler(io.BytesIO(pickled), allowed).load()
    except _NeedsCareError:
        return _CarefulUnpickler(io.BytesIO(pickled), allowed).load()


@contextlib.contextmanager
def _explaining(key: str) -> Iterator[None]:
    """Say which object it was, whatever goes wrong."""
    try:
        yield
    except _NotAllowedError as refused:
        raise UnsafeMetadataError(
            f"{key}: the checkpoint holds an object that needs {refused}, which was not run. If you trust "
            f"the checkpoint, pass safe_globals=[...] with it, or allow_pickle=True.",
            key=key,
            found=str(refused),
        ) from None
    except (IntegrityError, MemoryError):
        raise
    except Exception as error:
        raise IntegrityError(f"{key}: the stored object cannot be read: {error}", key=key) from error


def _pickle_record(stream: io.BytesIO) -> bytes | None:
    """The pickle in the container, or None if this is not the container that torch.save makes today."""
    stream.seek(0)
    if not zipfile.is_zipfile(stream):
        stream.seek(0)
        return None
    with zipfile.ZipFile(stream) as archive:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(names) != 1:
            return None
        info = archive.getinfo(names[0])
        if info.compress_type != zipfile.ZIP_STORED:
            raise IntegrityError("a compressed record is not what torch.save makes")
        return archive.read(info)


def _load_by_torch(stream: io.BytesIO, safe_globals: Sequence[Callable[..., Any] | type]) -> Any:
    stream.seek(0)
    try:
        with torch.serialization.safe_globals([*classes_for_torch(), *safe_globals]):
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

    def __init__(self, stream: io.BytesIO, allowed: dict[tuple[str, str], Any]) -> None:
        super().__init__(stream)
        self.allowed = allowed


class _CarefulUnpickler(_Rules, pickle._Unpickler):  # noqa: SLF001 - the Python one can be looked into
    """Also gives out classes written in Python, and numpy's: it checks every state that a pickle sets."""

    is_careful = True

    def __init__(self, stream: io.BytesIO, allowed: dict[tuple[str, str], Any]) -> None:
        super().__init__(stream)
        self.allowed = allowed

    def load_build(self) -> None:
        state, target = self.stack[-1], self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(target, type) or callable(target):
            raise _NotAllowedError(f"to change {target!r}")
        # Whoever holds something of numpy's has imported it.
        np = sys.modules.get("numpy")
        if np is not None and isinstance(target, np.dtype):
            if target.hasobject or target.fields or not _is_plain_dtype_state(state):
                raise _NotAllowedError("a numpy dtype with fields or objects")
        elif np is not None and isinstance(target, np.ndarray):
            _check_array_state(state, np)
        pickle._Unpickler.load_build(self)  # type: ignore[attr-defined]  # noqa: SLF001

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}  # noqa: SLF001


_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8


def _can_be_changed(found: Any) -> bool:
    """Whether it is a class whose attributes can be set, which a pickle could do for the whole process."""
    return isinstance(found, type) and found.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE) == _HEAP_TYPE


def _is_plain_dtype_state(state: Any) -> bool:
    return isinstance(state, tuple) and len(state) >= 7 and state[2:5] == (None, None, None)


def _check_array_state(state: Any, np: Any) -> None:
    if not isinstance(state, tuple) or len(state) != 5:
        raise TypeError("a numpy array with an unknown state")
    _, shape, dtype, _, content = state
    if not isinstance(dtype, np.dtype) or dtype.hasobject:
        raise _NotAllowedError("a numpy array of objects")
    if not isinstance(shape, tuple) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise TypeError("a numpy array with an impossible shape")
    count = 1
    for extent in shape:
        count *= extent
    if not isinstance(content, bytes) or len(content) != count * dtype.itemsize:
        raise TypeError("a numpy array whose bytes do not fill its shape")
