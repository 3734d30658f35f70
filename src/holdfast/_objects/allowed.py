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
from collections.abc import Callable
from typing import Any

import torch

from holdfast._objects.allowed_numpy import RefusedError, find_numpy, is_numpy


class StandIn:
    """Stands for a type that may be named as the default of a defaultdict, and called with care.

    ``list(range(10**12))`` is a few bytes of pickle; ``bytes()`` is how protocol 2 spells no bytes.

    Args:
        made: The type.
        make: Makes an instance of what a pickle gives it. Without one, nothing may be given.
    """

    def __init__(self, made: type, make: Callable[..., Any] | None = None) -> None:
        self.made = made
        self.make = make

    def __call__(self, *args: Any) -> Any:
        if self.make is not None:
            return self.make(*args)
        if args:
            raise TypeError(f"{self.made.__name__} may only be called without arguments")
        return self.made()


def _of_list(made: type) -> Callable[..., Any]:
    """A function that makes a collection of this type from a list or tuple."""

    def make(items: Any = (), *rest: Any) -> Any:
        # A range of a trillion numbers is a few bytes of pickle.
        if not isinstance(items, list | tuple):
            raise TypeError(f"a list was expected, not {type(items).__name__}")
        return made(items, *rest)

    return make


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
    made = factory.made if isinstance(factory, StandIn) else factory
    # Whatever type or function is here, the pickle was allowed to name it.
    if content or not (made is None or isinstance(made, type | types.FunctionType)):
        raise RefusedError(f"a defaultdict whose default is {made!r}")
    return collections.defaultdict(made)


def _counter(content: Any = None) -> collections.Counter[Any]:
    if content is not None and not isinstance(content, dict):
        raise TypeError("a dict was expected")
    return collections.Counter(content)


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
    """Stands for ``copyreg._reconstructor``, which made instances before protocol 2."""
    if cls not in (argparse.Namespace, types.SimpleNamespace) or base is not object or state is not None:
        raise TypeError("only a plain object may be made so")
    return cls()


_MADE_BY: dict[tuple[str, str], Any] = {
    ("builtins", "bytearray"): StandIn(bytearray, _bytearray),
    ("builtins", "Ellipsis"): ...,
    ("builtins", "NotImplemented"): NotImplemented,
    ("io", "BytesIO"): io.BytesIO,
    ("_codecs", "encode"): _encode,
    ("collections", "defaultdict"): StandIn(collections.defaultdict, _defaultdict),
    ("collections", "Counter"): StandIn(collections.Counter, _counter),
    ("fractions", "Fraction"): StandIn(fractions.Fraction, _fraction),
    ("copyreg", "_reconstructor"): _reconstructor,
    ("torch", "device"): StandIn(torch.device, _device),
    ("torch.serialization", "_get_layout"): _layout,
}
for _times in (dt.datetime, dt.date, dt.time, dt.timedelta, dt.timezone):
    _MADE_BY["datetime", _times.__name__] = _times
for _plain in (complex, slice, range, object, io.BytesIO, decimal.Decimal, uuid.UUID):
    _MADE_BY[_plain.__module__, _plain.__name__] = _plain
for _space in (types.SimpleNamespace, argparse.Namespace):
    _MADE_BY[_space.__module__, _space.__name__] = _space
for _list in (set, frozenset, collections.OrderedDict, collections.deque, torch.Size):
    _MADE_BY[_list.__module__, _list.__name__] = StandIn(_list, _of_list(_list))
for _module in ("pathlib", "pathlib._local"):
    for _path in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath):
        _MADE_BY[_module, _path.__name__] = _path
for _builtin in (int, float, bool, str, list, dict, tuple, bytes):
    _MADE_BY["builtins", _builtin.__name__] = StandIn(_builtin)


_TORCH_CONSTANTS = (torch.dtype, torch.memory_format, torch.qscheme)


def is_stand_in(value: object) -> bool:
    """Whether a value that is about to be pickled is a type that pickles may use, but not keep as a value."""
    if not isinstance(value, type):
        return False
    name = (value.__module__, value.__qualname__)
    return isinstance(_MADE_BY.get(name), StandIn) or is_numpy(*name) or name[0].startswith("numpy.dtypes")


def is_allowed(module: str, name: str) -> bool:
    """Whether a pickle may name this without the caller's leave."""
    if module == "torch" and isinstance(vars(torch).get(name), _TORCH_CONSTANTS):
        return True
    return (module, name) in _MADE_BY or is_numpy(module, name) or module.startswith("numpy.dtypes")


def find_allowed(module: str, name: str) -> Any:
    """The object that a pickle gets for a name.

    Raises:
        KeyError: The name is not allowed.
    """
    if (module, name) in _MADE_BY:
        found = _MADE_BY[module, name]
        # A pickle can set attributes of what it names: it gets one of its own to spoil.
        if isinstance(found, StandIn):
            return StandIn(found.made, found.make)
        return functools.partial(found) if isinstance(found, types.FunctionType) else found
    if module == "torch" and isinstance(found := vars(torch).get(name), _TORCH_CONSTANTS):
        return found
    if is_numpy(module, name):
        return find_numpy(module, name)
    raise KeyError(f"{module}.{name}")
