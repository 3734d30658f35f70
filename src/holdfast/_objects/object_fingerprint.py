"""Fingerprints of values that are not stored as tensors: whether two ranks hold equal ones."""

import copyreg
import hashlib
import struct
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch

from holdfast._io.blocks import BLOCK_SIZE, block_checksums
from holdfast._io.streams import memory_at

# Pickle gives up at about the same depth, and 200 levels leave room on the stack of a deep program.
_DEEPEST = 200
_MOST_REMEMBERED = 1 << 16
_MOST_BEGUN_AGAIN = 10_000
# From here on CRC-32 of blocks is hashed in the place of the bytes: 10 GB/s where blake2b does 0.8.
_LARGE = 64 << 10


def fingerprint(value: Any) -> bytes | None:
    """16 bytes that identify a value, and are the same in every process.

    Guaranteed: values of the same types with the same content have the same fingerprint, whatever the hash
    seed, the identity of the objects and their sharing, the order of sets and of the keys of dicts, the
    device and strides of tensors, and the memory order of arrays. Floats and arrays are compared by their
    bits: nan equals itself, 0.0 is not -0.0. Values of other types differ: 1, True and 1.0; a tuple and a
    list; "a" and b"a".

    Values that differ have different fingerprints; only where they differ inside of bytes or an array of more
    than 64 KiB alone, there is a chance of 1 in 4 billion that they have not. It is no defence against
    one who wants two values to look alike. Whether a tensor is a Parameter, and requires_grad, do not count.

    Objects are compared as pickle sees them: by what ``__reduce_ex__`` gives, which is called twice. So an
    attribute that an object fills in when it is first used counts; an OrderedDict's order counts, too.

    Returns:
        None for a value of which that cannot be said: one that does not pickle, is nested deeper than 200
        levels, looks different when looked at again, or is a subclass of a tensor. Never raises an Exception.
    """
    try:
        walk = _Walk()
        first = walk.encode(value)
        # What an object gives may be new each time: a counter, an address, the time.
        if walk.has_asked_objects and _Walk().encode(value) != first:
            return None
    except Exception:  # noqa: BLE001 - __reduce_ex__ of strangers may raise anything
        return None
    return first[1:] if first[:1] == _DIGEST else hashlib.blake2b(first, digest_size=16).digest()


class _UnknownError(Exception):
    pass


_DIGEST = b"#"


def _framed(tag: bytes, content: bytes) -> bytes:
    """An encoding that no other begins with."""
    return b"%b%d:%b" % (tag, len(content), content)


def _digest(tag: bytes, parts: Iterable[bytes]) -> bytes:
    """The encoding of a value that has several parts. Each part says where it ends."""
    made = hashlib.blake2b(tag + b"|", digest_size=16)
    parts = iter(parts)
    while group := b"".join(islice(parts, 1024)):
        made.update(group)
    return _DIGEST + made.digest()


def _of_bytes(tag: bytes, content: "bytes | bytearray | memoryview") -> bytes:
    if len(content) < _LARGE:
        return _framed(tag, bytes(content))
    size = b"%d in blocks of %d" % (len(content), BLOCK_SIZE)
    return _digest(b"large " + tag, [_framed(b"n", size), block_checksums(content).tobytes()])


def _of_int(value: int) -> bytes:
    return _framed(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _of_str(value: str) -> bytes:
    return _of_bytes(b"s", value.encode("utf-8", "surrogatepass"))


_ATOMS: dict[type, Callable[[Any], bytes]] = {
    int: _of_int,
    str: _of_str,
    float: lambda value: b"f" + struct.pack("<d", value),
    complex: lambda value: b"c" + struct.pack("<dd", value.real, value.imag),
    bool: lambda value: b"T" if value else b"F",
    type(None): lambda _: b"N",
    type(...): lambda _: b"E",
    type(NotImplemented): lambda _: b"I",
    bytes: lambda value: _of_bytes(b"b", value),
    bytearray: lambda value: _of_bytes(b"a", value),
    # Made when torch is imported, and known by their names.
    **dict.fromkeys(
        (torch.dtype, torch.layout, torch.memory_format, torch.qscheme),
        lambda value: _framed(b"w", str(value).encode()),
    ),
}
_PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}


class _Walk:
    """One walk through a value and all that it holds; every encoding says where it ends."""

    def __init__(self) -> None:
        self.has_asked_objects = False
        # By identity; the objects are kept so that no other gets the place of one in memory.
        self.known: dict[int, tuple[bytes, Any]] = {}
        self.levels: dict[int, int] = {}
        # The uppermost level that something below the present one refers back to.
        self.highest = _DEEPEST
        self.begun_again = 0

    def encode(self, value: Any) -> bytes:
        atom = _ATOMS.get(type(value))
        if atom is not None:
            return atom(value)
        identity = id(value)
        if identity in self.known:
            return self.known[identity][0]
        level = len(self.levels)
        if identity in self.levels:
            self.highest = min(self.highest, self.levels[identity])
            return _framed(b"^", b"%d" % (level - self.levels[identity]))
        if level >= _DEEPEST:
            raise _UnknownError
        self.levels[identity] = level
        above, self.highest = self.highest, _DEEPEST
        made = self._compound(value)
        del self.levels[identity]
        if self.highest >= level:
            # Nothing in it refers to what it stands in: it is the same wherever it stands.
            if len(self.known) < _MOST_REMEMBERED:
                self.known[identity] = made, value
            self.highest = above
        else:
            self.highest = min(above, self.highest)
            self.begun_again += 1
            if self.begun_again > _MOST_BEGUN_AGAIN:
                raise _UnknownError
        return made

    def _compound(self, value: Any) -> bytes:
        kind = type(value)
        if kind is tuple or kind is list:
            return self._sequence(kind.__name__.encode(), value)
        if kind is dict:
            return self._entries(b"dict", value.items())
        if kind is set or kind is frozenset:
            return _digest(kind.__name__.encode(), sorted(map(self.encode, value)))
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind is torch.UntypedStorage:
            return _of_bytes(
                b"storage", _memory_of(torch.empty(0, dtype=torch.uint8, device="cpu").set_(value))
            )
        if issubclass(kind, type) or kind is types.FunctionType:
            return _of_global(value, value.__qualname__)
        numpy = sys.modules.get("numpy")
        if numpy is not None and (kind is numpy.ndarray or issubclass(kind, numpy.generic)):
            return self._array(numpy.asarray(value), kind)
        return self._object(value)

    def _sequence(self, tag: bytes, parts: Iterable[Any]) -> bytes:
        return _digest(tag, map(self.encode, parts))

    def _entries(self, tag: bytes, entries: Iterable[tuple[Any, Any]]) -> bytes:
        return _digest(tag, sorted(self.encode(key) + self.encode(entry) for key, entry in entries))

    def _object(self, value: Any) -> bytes:
        """An object by the parts that pickle would rebuild it from."""
        self.has_asked_objects = True
        registered = copyreg.dispatch_table.get(type(value))
        reduced: Any = value.__reduce_ex__(4) if registered is None else registered(value)
        if isinstance(reduced, str):
            return _of_global(value, reduced)
        padded: tuple[Any, ...] = (*reduced, *[None] * (6 - len(reduced)))
        make, args, state, items, entries, setter = padded
        parts = [self.encode(make), self.encode(args), self.encode(state), self.encode(setter)]
        parts.append(b"-" if items is None else self._sequence(b"items", items))
        if entries is None:
            parts.append(b"-")
        elif isinstance(value, OrderedDict):
            parts.append(self._sequence(b"entries", list(entries)))
        else:
            parts.append(self._entries(b"entries", entries))
        return _digest(b"object", parts)

    def _array(self, array: Any, kind: type) -> bytes:
        dtype = array.dtype
        parts = [self.encode(kind), self.encode(array.shape), _of_str(dtype.str)]
        if dtype.names is not None:
            # Field by field: what lies between fields is whatever was in memory before.
            parts += [_of_str(name) + self._array(array[name], kind) for name in dtype.names]
        elif dtype.hasobject:
            parts.append(self._sequence(b"objects", array.ravel().tolist()))
        elif dtype.char in "gG":
            raise _UnknownError  # 6 of the 16 bytes of a long double are whatever was there before
        else:
            flat = array.ravel(order="C").view("u1") if array.size else b""
            parts.append(_of_bytes(b"elements", memoryview(flat)))
        return _digest(b"array", parts)

    def _tensor(self, value: torch.Tensor) -> bytes:
        if type(value) not in _PLAIN_TENSORS and not value.is_nested:
            raise _UnknownError
        value = value.detach()
        parts = [self.encode(value.dtype), self.encode(value.layout)]
        if value.is_nested:
            parts += [self._tensor(part) for part in value.unbind()]
            return _digest(b"nested", parts)
        parts.append(self.encode(tuple(value.shape)))
        if value.is_quantized:
            parts += [self.encode(part) for part in _quantization(value)]
            value = value.int_repr()
        if value.is_meta:
            return _digest(b"meta", parts)
        if value.layout is not torch.strided:
            parts += [self.encode(part) for part in _sparse_parts(value)]
            return _digest(b"sparse", parts)
        parts.append(_of_bytes(b"elements", _memory_of(value)))
        return _digest(b"tensor", parts)


def _of_global(value: Any, name: str) -> bytes:
    # What is neither class nor function says by __reduce__ that its name leads to it.
    module = (value if isinstance(value, type | types.FunctionType) else type(value)).__module__
    if "<" in name:
        raise _UnknownError  # a lambda, or made inside of a function: the name does not lead to it
    return _framed(b"g", f"{module}:{name}".encode())


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """The elements in row-major order; copied only if they do not lie in the host's memory like that."""
    tensor = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    if not tensor.nbytes:
        return memoryview(b"")
    return memory_at(tensor.data_ptr(), tensor.nbytes, tensor)


def _quantization(tensor: torch.Tensor) -> tuple[Any, ...]:
    scheme = tensor.qscheme()
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return scheme, tensor.q_scale(), tensor.q_zero_point()
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return scheme, scales, zeros, tensor.q_per_channel_axis()


def _sparse_parts(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is torch.sparse_coo:
        return tensor.is_coalesced(), tensor._indices(), tensor._values()  # noqa: SLF001 - others coalesce
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor.to_dense(),)
