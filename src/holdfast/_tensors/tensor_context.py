"""The context of a tensor subclass, what it keeps besides its tensors, as data: stored, compared, made again.

Numbers, strings, bytes and None stand for themselves. Everything else is a list that begins with the name of
its kind. Classes are kept by name. To make a context again, they are looked up among the modules that the
program has imported already. Nothing is imported, and no constructor is called.
"""

import dataclasses
import enum
import math
import sys
import types
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

_LISTS: dict[type, str] = {list: "list", tuple: "tuple", torch.Size: "size"}
_MAKE_LIST: dict[str, Any] = {name: kind for kind, name in _LISTS.items()}
_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


class Model(NamedTuple):
    """The facts of a tensor that stand for the marks in its context.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        device: Where its parts are.
    """

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device


def encode_context(value: Any, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> Any:
    """A context as data.

    Args:
        value: The context, or a value in it.
        shapes: The shapes of the tensor: that of the whole, and that of this rank's part. Where a list has a
            number for each dimension, one that is the tensor's own length becomes a mark. So a context does
            not depend on how the tensor is divided over ranks.
        dtype: The dtype of the tensor, which becomes a mark, too: it is compared by rules of its own.

    Raises:
        TypeError: There is something in it that cannot be kept as data.
    """
    if value is None or type(value) in (bool, str, bytes):
        return value
    if type(value) in (int, float):
        return _encode_number(value)
    if isinstance(value, list | tuple) and type(value) in _LISTS:
        return _encode_list(value, shapes, dtype)
    if type(value) is dict:
        return ["dict", [[encode_context(part, shapes, dtype) for part in entry] for entry in value.items()]]
    if isinstance(value, _TORCH_CONSTANTS):
        return ["dtype"] if value is dtype else ["torch", str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        # It is not the same on every rank, and a load does not move tensors.
        return ["device"]
    return _encode_object(value, shapes, dtype)


def _encode_number(value: float) -> Any:
    if isinstance(value, int):
        # MessagePack has 64 bits.
        return value if -(1 << 63) <= value < 1 << 63 else ["int", str(value)]
    # What is not a number is not equal to itself.
    return ["nan"] if math.isnan(value) else value


def _encode_list(value: Sequence[Any], shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Any]:
    kind = _LISTS[type(value)]
    if len(value) == len(shapes[0]) and all(type(entry) is int for entry in value):
        lengths = [None if entry in own else entry for entry, *own in zip(value, *shapes, strict=True)]
        if None in lengths:
            return ["shape", kind, lengths]
    return [kind, [encode_context(entry, shapes, dtype) for entry in value]]


@runtime_checkable
class _NamedTuple(Protocol):
    _fields: tuple[str, ...]


def _encode_object(value: Any, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Any]:
    named = value if isinstance(value, type | types.FunctionType) else type(value)
    where = [named.__module__, named.__qualname__]
    if named is value:
        return ["named", *where]
    if isinstance(value, enum.Enum):
        return ["enum", *where, value.name]
    if isinstance(value, tuple) and isinstance(value, _NamedTuple):
        return ["namedtuple", *where, [encode_context(entry, shapes, dtype) for entry in value]]
    if dataclasses.is_dataclass(value) and not isinstance(value, torch.Tensor | torch.nn.Module):
        facts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        facts |= getattr(value, "__dict__", {})
        return [
            "dataclass",
            *where,
            [[name, encode_context(fact, shapes, dtype)] for name, fact in facts.items()],
        ]
    raise TypeError(f"a {'.'.join(where)}, which cannot be kept as data")


def is_same_context(one: Any, other: Any) -> bool:
    """Whether two contexts, as data, mean the same: lists, tuples and sizes of the same entries do."""
    try:
        return bool(_comparable(one) == _comparable(other))
    except (ValueError, TypeError, IndexError):
        return False  # a checkpoint may say anything


def _comparable(data: Any) -> Any:
    """Data that equals that of another context if both mean the same."""
    if not isinstance(data, list):
        return type(data).__name__, data
    kind, *rest = data
    if kind in _MAKE_LIST:
        return "list", [*map(_comparable, rest[0])]
    if kind == "shape":  # of a list or a tuple
        return kind, rest[1:]
    if kind == "dict":
        return kind, sorted(([*map(_comparable, entry)] for entry in rest[0]), key=repr)
    if kind == "dataclass":
        return kind, rest[:2], [[*map(_comparable, fact)] for fact in rest[2]]
    return (kind, rest[:2], [*map(_comparable, rest[2])]) if kind == "namedtuple" else data


def decode_context(data: Any, like: Model) -> Any:
    """Make a context again.

    Args:
        data: What ``encode_context`` returned.
        like: What the marks in it stand for.

    Raises:
        TypeError: It names something that the program has not imported, a function or a class as a value, or
            is not what ``encode_context`` makes.
    """
    if not isinstance(data, list):
        return data
    try:
        kind, *rest = data
        if kind in ("device", "dtype", "nan"):
            return {"device": like.device, "dtype": like.dtype, "nan": math.nan}[kind]
        if kind == "int":
            return int(rest[0])
        if kind == "shape":
            lengths = zip(rest[1], like.shape, strict=True)
            return _MAKE_LIST[rest[0]](own if length is None else length for length, own in lengths)
        if kind in _MAKE_LIST:
            return _MAKE_LIST[kind](decode_context(entry, like) for entry in rest[0])
        if kind == "dict":
            return {decode_context(key, like): decode_context(entry, like) for key, entry in rest[0]}
        if kind == "torch":
            return torch_constant(rest[0])
        return _decode_object(like, kind, *rest)
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        raise TypeError(f"the context {str(data)[:80]} cannot be: {error!r}") from None


def torch_constant(name: str) -> Any:
    """The dtype, layout or memory format that torch has under a name. Raises TypeError if there is none."""
    found = vars(torch).get(name)
    if not isinstance(found, _TORCH_CONSTANTS):
        raise TypeError(f"torch.{name} is unknown here")
    return found


def _decode_object(like: Model, kind: str, module: str, name: str, *rest: Any) -> Any:
    named = find_imported(module, name)
    if kind == "enum" and isinstance(named, enum.EnumMeta):
        return named.__members__[rest[0]]
    if kind == "namedtuple" and isinstance(named, type) and issubclass(named, tuple):
        entries = [decode_context(entry, like) for entry in rest[0]]
        if len(entries) == len(named._fields):  # type: ignore[attr-defined]
            return tuple.__new__(named, entries)
    if kind == "dataclass" and isinstance(named, type) and dataclasses.is_dataclass(named):
        facts = {str(field): decode_context(fact, like) for field, fact in rest[0]}
        return _instance(named, facts)
    raise TypeError(f"it needs {module}.{name}, which is not made from what a checkpoint says")


def _instance(cls: type, facts: dict[str, Any]) -> Any:
    """An instance of a dataclass, made without calling any code of the class."""
    made: Any = object.__new__(cls)
    for name, fact in facts.items():
        object.__setattr__(made, name, fact)
    return made


def shown(data: Any) -> str:
    """A context for messages, as Python would show it."""
    try:
        return _shown(data)
    except (ValueError, TypeError, IndexError):
        # A checkpoint may say anything.
        return str(data)


def _shown(data: Any) -> str:
    if not isinstance(data, list):
        return repr(data)
    kind, *rest = data
    if kind in _MAKE_LIST:
        return f"({', '.join(map(_shown, rest[0]))})"
    if kind == "shape":
        return f"({', '.join('its length' if length is None else str(length) for length in rest[1])})"
    if kind == "dict":
        return f"{{{', '.join(f'{_shown(key)}: {_shown(value)}' for key, value in rest[0])}}}"
    if kind in ("namedtuple", "dataclass"):
        facts = [_shown(fact) if kind == "namedtuple" else f"{fact[0]}={_shown(fact[1])}" for fact in rest[2]]
        return f"{rest[1]}({', '.join(facts)})"
    return ".".join(
        [kind, *map(str, rest)] if kind == "torch" else [str(part) for part in rest[1:]] or [kind]
    )


def find_imported(module: str, name: str) -> Any:
    """Look up ``name`` in a module that the program has imported.

    Raises:
        TypeError: The program has not imported it.
    """
    found: Any = sys.modules.get(module)
    for step in name.split("."):
        # Not getattr, which may run code of a module or a class.
        found = None if found is None else vars(found).get(step)
    if found is None:
        raise TypeError(f"{module}.{name} is not imported; import it first")
    return found
