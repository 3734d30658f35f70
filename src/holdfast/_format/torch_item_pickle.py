"""Owns the few opcodes and names of which torch makes the pickle of a plain tensor.

Nothing is imported and nothing is called: names become text, and the calls that torch writes become the
facts that they carry. A pickle that uses anything else is not a plain tensor.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from holdfast._format.torch_item import TYPED_STORAGES, UNTYPED_DTYPES

__all__ = ["NotPlainError", "PickledStorage", "PickledTensor", "parse_tensor"]

# No place in a storage, and no size of one, can be larger.
_MOST = 2**63
# More than torch can make.
_MOST_DIMS = 255


class NotPlainError(Exception):
    """The pickle describes something else than a plain strided tensor, or is no pickle at all."""


class PickledStorage(NamedTuple):
    """A storage by reference: its record's key, and its length in elements; untyped ones count bytes."""

    dtype: str | None
    key: str
    numel: int


class PickledTensor(NamedTuple):
    """What the pickle says of the tensor; numbers are in range, but not checked against the storage."""

    storage: PickledStorage
    dtype: str
    storage_offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    conj: bool
    neg: bool


class _Name(str):
    __slots__ = ()


_STORAGES = {_Name(f"torch {storage}"): dtype for dtype, storage in TYPED_STORAGES.items()}
_DTYPES = {_Name(f"torch {dtype}"): dtype for dtype in (*TYPED_STORAGES, *UNTYPED_DTYPES)}
_UNTYPED_STORAGE = _Name("torch.storage UntypedStorage")
_REBUILD_TENSOR = ("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3")
_TENSOR_TYPES = (_Name("torch Tensor"), _Name("torch.nn.parameter Parameter"))


# Tensors of one dtype and shape have the same pickle: 0.1 microseconds in place of 15. Pickles of
# at most 64 KiB come here, so the cache takes 16 MiB at the very worst.
@lru_cache(maxsize=256)
def parse_tensor(data: bytes) -> PickledTensor:
    """Read the pickle of a tensor.

    Takes time and memory in proportion to ``data``.

    Raises:
        NotPlainError: It is not one, whatever the reason.
    """
    try:
        result = _run(data)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise NotPlainError(f"{type(error).__name__}: {error}") from error
    _require(type(result) is PickledTensor)
    assert isinstance(result, PickledTensor)
    return result


def _require(condition: bool) -> None:
    if not condition:
        raise NotPlainError("not a plain tensor")


def _run(data: bytes) -> Any:  # noqa: C901, PLR0912, PLR0915 - one branch for each opcode
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    _require(data[:2] == b"\x80\x02")
    at = 2
    while True:
        opcode = data[at : at + 1]
        at += 1
        if opcode == b"q":  # BINPUT
            memo[data[at]] = stack[-1]
            at += 1
        elif opcode == b"K":  # BININT1
            stack.append(data[at])
            at += 1
        elif opcode == b"c":  # GLOBAL
            middle = data.index(b"\n", at)
            end = data.index(b"\n", middle + 1)
            stack.append(_Name(f"{data[at:middle].decode()} {data[middle + 1 : end].decode()}"))
            at = end + 1
        elif opcode == b"X":  # BINUNICODE
            end = at + 4 + int.from_bytes(data[at : at + 4], "little")
            stack.append(data[at + 4 : end].decode())
            at = end
        elif opcode == b"(":  # MARK
            marks.append(len(stack))
        elif opcode == b"t":  # TUPLE
            mark = marks.pop()
            stack[mark:] = [tuple(stack[mark:])]
        elif opcode in _TUPLES:
            size = _TUPLES[opcode]
            _require(len(stack) - (marks[-1] if marks else 0) >= size)
            stack[len(stack) - size :] = [tuple(stack[len(stack) - size :])]
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode in _INTEGERS:
            width = _INTEGERS[opcode]
            stack.append(int.from_bytes(data[at : at + width], "little", signed=width == 4))
            at += width
        elif opcode == b"\x8a":  # LONG1
            end = at + 1 + data[at]
            stack.append(int.from_bytes(data[at + 1 : end], "little", signed=True))
            at = end
        elif opcode == b"Q":  # BINPERSID
            stack[-1] = _storage(*stack[-1])
        elif opcode == b"R":  # REDUCE
            arguments = stack.pop()
            stack[-1] = _call(stack[-1], arguments)
        elif opcode == b"h":  # BINGET
            stack.append(memo[data[at]])
            at += 1
        elif opcode == b"}":  # EMPTY_DICT
            stack.append({})
        elif opcode == b"s":  # SETITEM
            value, key = stack.pop(), stack.pop()
            # Text only: the hash of a deep nest of tuples would overflow the C stack.
            _require(type(key) is str and type(stack[-1]) is dict)
            stack[-1][key] = value
        elif opcode == b"u":  # SETITEMS
            mark = marks.pop()
            pairs = stack[mark:]
            del stack[mark:]
            _require(all(type(key) is str for key in pairs[::2]) and type(stack[-1]) is dict)
            stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))
        else:
            _require(opcode == b"." and len(stack) == 1)  # STOP
            return stack[0]


_TUPLES = {b")": 0, b"\x85": 1, b"\x86": 2, b"\x87": 3}
_CONSTANTS = {b"\x88": True, b"\x89": False, b"N": None}
_INTEGERS = {b"M": 2, b"J": 4}


def _storage(tag: Any, storage_type: Any, key: Any, location: Any, numel: Any) -> PickledStorage:
    _require(tag == "storage" and type(key) is str and type(location) is str)
    _require(type(storage_type) is _Name and type(numel) is int and 0 <= numel < _MOST)
    _require(storage_type in _STORAGES or storage_type == _UNTYPED_STORAGE)
    return PickledStorage(_STORAGES.get(storage_type), key, numel)


def _call(function: Any, arguments: Any) -> Any:
    _require(type(function) is _Name and type(arguments) is tuple)
    return _CALLS[function](*arguments)


def _ordered_dict() -> dict[str, Any]:
    return {}


def _size(numbers: Any) -> Any:
    _require(type(numbers) is tuple)
    return numbers


def _tensor_v2(storage: Any, *facts: Any) -> PickledTensor:
    _require(type(storage) is PickledStorage)
    return _tensor(storage, storage.dtype, *facts)


def _tensor_v3(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    *metadata: Any,
) -> PickledTensor:
    _require(type(storage) is PickledStorage and storage.dtype is None and type(dtype) is _Name)
    return _tensor(storage, _DTYPES[dtype], offset, shape, strides, requires_grad, hooks, *metadata)


def _tensor(
    storage: PickledStorage,
    dtype: str | None,
    offset: Any,
    shape: Any,
    strides: Any,
    requires_grad: Any,
    hooks: Any,
    metadata: Any = None,
) -> PickledTensor:
    _require(type(shape) is tuple and type(strides) is tuple and len(shape) == len(strides) <= _MOST_DIMS)
    _require(all(type(n) is int and 0 <= n < _MOST for n in (offset, *shape, *strides)))
    _require(dtype is not None and type(requires_grad) is bool and not hooks)
    bits = {} if metadata is None else metadata
    _require(type(bits) is dict and bits.keys() <= {"conj", "neg"})
    assert dtype is not None
    conj, neg = bits.get("conj", False) is True, bits.get("neg", False) is True
    return PickledTensor(storage, dtype, offset, shape, strides, requires_grad, conj, neg)


def _parameter(tensor: Any, requires_grad: Any, hooks: Any, state: Any = None) -> PickledTensor:
    _require(type(tensor) is PickledTensor and type(requires_grad) is bool and not hooks and not state)
    assert isinstance(tensor, PickledTensor)
    return tensor._replace(requires_grad=requires_grad)


def _from_type(function: Any, tensor_type: Any, arguments: Any, state: Any) -> Any:
    # With attributes of its own the tensor is more than its bytes.
    _require(type(tensor_type) is _Name and tensor_type in _TENSOR_TYPES and not state)
    _require(function in _REBUILD_TENSOR)  # not this function again: that could go on without end
    return _call(function, arguments)


_CALLS: dict[str, Callable[..., Any]] = {
    "collections OrderedDict": _ordered_dict,
    "torch Size": _size,
    "torch._utils _rebuild_tensor_v2": _tensor_v2,
    "torch._utils _rebuild_tensor_v3": _tensor_v3,
    "torch._utils _rebuild_parameter": _parameter,
    "torch._utils _rebuild_parameter_with_state": _parameter,
    "torch._tensor _rebuild_from_type_v2": _from_type,
}
