"""What a pickle from a checkpoint may name: data types only, made by functions that check their input."""

import argparse
import collections
import datetime as dt
import decimal
import fractions
import functools
import io
import pathlib
import re
import types
import uuid
from typing import Any

import torch

from holdfast._objects.allowed_numpy import find_numpy, is_numpy

__all__ = ["Factory", "find_allowed", "is_allowed", "is_factory"]


class Factory:
    """Stands for a builtin type that may be named, as the default of a defaultdict, and called for nothing.

    ``list(range(10**12))`` is a few bytes of pickle; ``bytes()`` is how protocol 2 spells no bytes.

    Attributes:
        made: The type.
        is_used: Whether it served one of these purposes. If not, it stands in the place of the type itself.
    """

    def __init__(self, made: type) -> None:
        self.made = made
        self.is_used = False

    def __call__(self) -> Any:
        self.is_used = True
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
    if factory is None:
        return collections.defaultdict(None)
    factory.is_used = True
    return collections.defaultdict(factory.made)


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
    layout = vars(torch).get(str(name).removeprefix("torch."))
    if not isinstance(layout, torch.layout):
        raise TypeError("a layout was expected")
    return layout


def _fraction(text: Any, denominator: Any = None) -> fractions.Fraction:
    if type(text) is int and type(denominator) is int:
        return fractions.Fraction(text, denominator)
    # "1e999999999" is a few bytes of pickle, and a number of a billion digits.
    if (
        denominator is not None
        or not isinstance(text, str)
        or not re.fullmatch(r"-?[0-9]{1,5000}(/[0-9]{1,5000})?", text)
    ):
        raise TypeError("a fraction was expected")
    return fractions.Fraction(text)


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
    ("builtins", "Ellipsis"): ...,
    ("builtins", "NotImplemented"): NotImplemented,
    ("_io", "BytesIO"): io.BytesIO,
    ("io", "BytesIO"): io.BytesIO,
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
    ("fractions", "Fraction"): _fraction,
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


_TORCH_CONSTANTS = (torch.dtype, torch.memory_format, torch.qscheme)


def is_factory(value: object) -> bool:
    """Whether a value that is about to be pickled is a type that a pickle may only name as a default."""
    return isinstance(value, type) and isinstance(
        _MADE_BY.get((value.__module__, value.__qualname__)), Factory
    )


def is_allowed(module: str, name: str) -> bool:
    """Whether a pickle may name this without the caller's leave."""
    if module == "torch" and isinstance(vars(torch).get(name), _TORCH_CONSTANTS):
        return True
    return (module, name) in _MADE_BY or is_numpy(module, name) or module.startswith("numpy.dtypes")


def find_allowed(module: str, name: str) -> Any:
    """What a pickle gets for a name.

    Raises:
        KeyError: The name is not allowed.
    """
    if (module, name) in _MADE_BY:
        found = _MADE_BY[module, name]
        # A pickle can set attributes of what it names: it gets one of its own to spoil.
        if isinstance(found, Factory):
            return Factory(found.made)
        return functools.partial(found) if isinstance(found, types.FunctionType) else found
    if module == "torch" and isinstance(found := vars(torch).get(name), _TORCH_CONSTANTS):
        return found
    if is_numpy(module, name):
        return find_numpy(module, name)
    raise KeyError(f"{module}.{name}")
