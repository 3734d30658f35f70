"""What a pickle from a checkpoint may name: data types only, made by functions that check their input."""

import argparse
import collections
import datetime as dt
import decimal
import fractions
import functools
import importlib
import pathlib
import sys
import types
import uuid
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Factory", "classes_for_torch", "find_allowed", "is_allowed", "is_numpy"]


class Factory:
    """Stands for a builtin type that may be named, as the default of a defaultdict, and called for nothing.

    ``list(range(10**12))`` is a few bytes of pickle; ``bytes()`` is how protocol 2 spells no bytes.
    """

    def __init__(self, made: type) -> None:
        self.made = made

    def __call__(self) -> Any:
        return self.made()


def _set(items: Any = ()) -> set[Any]:
    return set(_sequence(items))


def _frozenset(items: Any = ()) -> frozenset[Any]:
    return frozenset(_sequence(items))


def _sequence(items: Any) -> list[Any] | tuple[Any, ...]:
    # A range of a trillion numbers is a few bytes of pickle.
    if not isinstance(items, list | tuple):
        raise TypeError(f"a list was expected, not {type(items).__name__}")
    return items


def _bytearray(content: Any = b"", encoding: Any = None) -> bytearray:
    if isinstance(content, str) and encoding == "latin-1":
        return bytearray(content, "latin-1")
    if isinstance(content, bytes) and encoding is None:
        return bytearray(content)
    raise TypeError("bytes were expected")


def _encode(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise TypeError("text in latin1 was expected")
    return text.encode("latin1")


def _defaultdict(factory: Any = None, *content: Any) -> collections.defaultdict[Any, Any]:
    if content or not (factory is None or isinstance(factory, Factory)):
        raise TypeError("a defaultdict's default may only be a builtin type")
    return collections.defaultdict(None if factory is None else factory.made)


def _deque(items: Any = (), maxlen: Any = None) -> collections.deque[Any]:
    return collections.deque(_sequence(items), maxlen)


def _counter(content: Any = None) -> collections.Counter[Any]:
    if content is not None and not isinstance(content, dict):
        raise TypeError("a dict was expected")
    return collections.Counter(content)


def _ordered_dict(items: Any = ()) -> collections.OrderedDict[Any, Any]:
    return collections.OrderedDict(_sequence(items))


def _size(dims: Any = ()) -> torch.Size:
    return torch.Size(_sequence(dims))


def _device(kind: Any, index: Any = None) -> torch.device:
    if not isinstance(kind, str) or not isinstance(index, int | None):
        raise TypeError("a device's type and number were expected")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _layout(name: Any) -> torch.layout:
    layout = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise TypeError("a layout was expected")
    return layout


def _reconstructor(cls: Any, base: Any, state: Any) -> Any:
    """What copyreg did for plain classes before protocol 2."""
    if cls not in (argparse.Namespace, types.SimpleNamespace) or base is not object or state is not None:
        raise TypeError("only a plain object may be made so")
    return cls()


_MADE_BY: dict[tuple[str, str], Any] = {
    ("builtins", "set"): _set,
    ("builtins", "frozenset"): _frozenset,
    ("builtins", "bytearray"): _bytearray,
    ("builtins", "complex"): complex,
    ("builtins", "slice"): slice,
    ("builtins", "range"): range,
    ("builtins", "xrange"): range,
    ("builtins", "object"): object,
    ("_codecs", "encode"): _encode,
    ("collections", "OrderedDict"): _ordered_dict,
    ("collections", "defaultdict"): _defaultdict,
    ("collections", "deque"): _deque,
    ("collections", "Counter"): _counter,
    ("datetime", "datetime"): dt.datetime,
    ("datetime", "date"): dt.date,
    ("datetime", "time"): dt.time,
    ("datetime", "timedelta"): dt.timedelta,
    ("datetime", "timezone"): dt.timezone,
    ("decimal", "Decimal"): decimal.Decimal,
    ("fractions", "Fraction"): fractions.Fraction,
    ("uuid", "UUID"): uuid.UUID,
    ("types", "SimpleNamespace"): types.SimpleNamespace,
    ("argparse", "Namespace"): argparse.Namespace,
    ("copyreg", "_reconstructor"): _reconstructor,
    ("torch", "Size"): _size,
    ("torch", "device"): _device,
    ("torch.serialization", "_get_layout"): _layout,
}
for _module in ("pathlib", "pathlib._local"):
    for _path in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath):
        _MADE_BY[_module, _path.__name__] = _path
for _builtin in (int, float, bool, str, list, dict, tuple, bytes):
    _MADE_BY["builtins", _builtin.__name__] = Factory(_builtin)

_NUMPY = {
    *(
        (f"numpy.{core}.multiarray", name)
        for core in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    ),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}


def is_allowed(module: str, name: str) -> bool:
    """Whether a pickle may name this without the caller's leave."""
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.memory_format):
        return True
    return (module, name) in _MADE_BY or is_numpy(module, name) or module.startswith("numpy.dtypes")


def is_numpy(module: str, name: str) -> bool:
    """Whether this is one of the names that numpy's arrays, scalars and dtypes are pickled with."""
    return (module, name) in _NUMPY or (module == "numpy" and name in _SCALARS)


_SCALARS = frozenset(
    f"{kind}{bits}"
    for kind, widths in {
        "int": (8, 16, 32, 64),
        "uint": (8, 16, 32, 64),
        "float": (16, 32, 64),
        "complex": (64, 128),
    }.items()
    for bits in widths
) | {"bool", "bool_", "str_", "bytes_"}


def find_allowed(module: str, name: str) -> Any:
    """What a pickle gets for a name.

    Raises:
        KeyError: The name is not allowed.
    """
    if (module, name) in _MADE_BY:
        found = _MADE_BY[module, name]
        # A pickle can set attributes of what it names: it gets a function of its own to spoil.
        return functools.partial(found) if isinstance(found, types.FunctionType) else found
    found = None
    if module == "torch" and "." not in name:
        found = getattr(torch, name, None)
        if isinstance(found, torch.dtype | torch.memory_format):
            return found
    if is_numpy(module, name):
        return _find_numpy(module, name)
    raise KeyError(f"{module}.{name}")


def classes_for_torch() -> list[Any]:
    """The classes among them that torch's own weights-only unpickler is to allow besides its own."""
    found: list[Any] = [made for made in _MADE_BY.values() if isinstance(made, type) and made is not object]
    found += [collections.deque]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found += [numpy.ndarray, numpy.dtype, *{type(numpy.dtype(name)) for name in _DTYPES}]
        found += [_find_numpy("numpy._core.multiarray", name) for name in ("_reconstruct", "scalar")]
    return found


_DTYPES = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "S", "U")


def _find_numpy(module: str, name: str) -> Callable[..., Any] | type:
    # numpy 2 moved numpy.core to numpy._core; each reads the other's pickles under its own name.
    for candidate in (module, module.replace("numpy.core", "numpy._core"), module.replace("._core", ".core")):
        try:
            found: Any = getattr(importlib.import_module(candidate), name)
        except (ImportError, AttributeError):
            continue
        return found  # type: ignore[no-any-return]
    raise KeyError(f"{module}.{name}")
