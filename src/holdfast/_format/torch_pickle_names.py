"""The complete list of what a metadata pickle may name, each with a harmless stand-in.

A pickle asks for an object by module and name. Nothing is imported here: the name is looked up in
``ALLOWED`` and answered with a ``Record`` (a class of which blank instances can be made), a ``Call`` (a
function of ours that checks its arguments), or a ``Symbol`` (a dtype, layout or memory format by name).
"""

import ntpath
import posixpath
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast._format.dtypes import DTYPES

# torch itself refuses more than 64 dimensions.
MAX_NDIM = 64
_MAX_KEY_PARTS = MAX_NDIM + 8
_MAX_ELEMENTS = 2**63

LAYOUTS = (
    "strided",
    "sparse_coo",
    "sparse_csr",
    "sparse_csc",
    "sparse_bsr",
    "sparse_bsc",
    "jagged",
    "_mkldnn",
)
MEMORY_FORMATS = {
    "TORCH_CONTIGUOUS_FORMAT": "contiguous_format",
    "TORCH_CHANNELS_LAST": "channels_last",
    "TORCH_PRESERVE_FORMAT": "preserve_format",
}


@dataclass(slots=True, eq=False)
class Record:
    """Stands for one of torch's metadata classes.

    ``parameters`` are those of its constructor, where a pickle may call that instead of setting the state;
    the writer beside this module does. ``state_type`` is the type of that state.
    """

    name: str
    parameters: tuple[str, ...] = ()
    state_type: type = dict


@dataclass(slots=True, eq=False)
class Call:
    """Stands for something that a pickle may call.

    ``make`` raises TypeError, ValueError or LookupError on arguments that no honest pickle has; what it
    makes is no larger than its arguments, and ``copies`` says whether it is as large.
    """

    name: str
    make: Callable[..., Any]
    copies: bool = False


@dataclass(slots=True, eq=False)
class Built:
    """An instance of a record's class: ``state`` is None until the pickle gives it, once."""

    record: Record
    state: Any = None


class IndexKey(tuple[str, tuple[int, ...]]):
    """A ``MetadataIndex`` with an offset, once it has been read and checked. Pickles cannot make one."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class Symbol:
    """Stands for a constant of torch, such as the dtype ``float32``."""

    kind: str
    name: str


def make_size(dims: object) -> tuple[int, ...]:
    """``torch.Size`` of a tuple: as many dimensions, and as large ones, as torch can have."""
    if type(dims) is not tuple or len(dims) > MAX_NDIM:
        raise TypeError("torch.Size takes a tuple of at most 64 numbers")
    for dim in dims:
        if type(dim) is not int or not 0 <= dim < _MAX_ELEMENTS:
            raise ValueError("torch.Size takes numbers from 0 to 2**63 - 1")
    return dims


def add_to_dict(target: dict[Any, Any], key: Any, value: object) -> None:
    """Set an item that is not there yet, under a key that is cheap to hash and to compare.

    Raises:
        TypeError: The key is not plain, is large, or is there already.
    """
    if type(key) not in _CHEAP_KEYS:
        _check_key(key)
    # A pickled dict names each key once. Naming long equal ones again and again would cost quadratic time.
    if key in target:
        raise TypeError("a dict has the same key twice")
    target[key] = value


def add_to_set(target: set[Any], items: list[Any]) -> None:
    """As ``add_to_dict``, for the members of a set."""
    for item in items:
        _check_key(item)
        if item in target:
            raise TypeError("a set has the same member twice")
        target.add(item)


def _check_key(key: object) -> None:
    # Python hashes a tuple by visiting all it holds, each time: 40 pairs of pairs would take 2**40 steps, and
    # a tuple nested a million deep overflows the C stack and ends the process.
    parts = [key]
    for visited, part in enumerate(parts, 1):
        if visited > _MAX_KEY_PARTS:
            raise TypeError("a key has too many parts")
        kind = type(part)
        if kind is tuple:
            parts.extend(part[: _MAX_KEY_PARTS + 1])  # type: ignore[index]
        elif kind is int:
            if part.bit_length() > 64:  # type: ignore[attr-defined]
                raise TypeError("a key is a number of more than 64 bits")
        elif kind not in _CHEAP_KEYS:
            raise TypeError("a key is not a plain value")


def _make_set(items: object = ()) -> set[Any]:
    if type(items) is not list:
        raise TypeError("a set is made of a list")
    made: set[Any] = set()
    add_to_set(made, items)
    return made


def make_frozenset(items: object = ()) -> frozenset[Any]:
    """The frozenset of a list of members, as ``add_to_set`` takes them."""
    return frozenset(_make_set(items))


def _make_layout(name: object) -> Symbol:
    return _LAYOUTS[_checked_str(name)]


def _make_memory_format(value: object) -> Symbol:
    if type(value) is not int or not 0 <= value < len(_BY_VALUE):
        raise ValueError("not the number of a memory format")
    return _BY_VALUE[value]


def _get_member(owner: object, name: object) -> Symbol:
    # Python 3.11.0 to 3.11.3 pickle an enum's member as getattr(enum, name). No other use is allowed.
    if owner is not MEMORY_FORMAT:
        raise TypeError("getattr is allowed on the memory format enum only")
    return _BY_NAME[_checked_str(name)]


def _make_bytes(text: object, encoding: object) -> bytes:
    # How protocols 2 and 3 write bytes.
    if encoding != "latin1":
        raise ValueError("bytes are encoded in latin1")
    return _checked_str(text).encode("latin1")


def _make_bytearray(content: object = b"") -> bytearray:
    if type(content) is not bytes:
        raise TypeError("a bytearray is made of bytes")
    return bytearray(content)


def _join_posix(*parts: object) -> str:
    return posixpath.join("", *map(_checked_str, parts))


def _join_windows(*parts: object) -> str:
    return ntpath.join("", *map(_checked_str, parts))


def _checked_str(value: object) -> str:
    if type(value) is not str:
        raise TypeError("expected a str")
    return value


_CHEAP_KEYS = frozenset({str, bytes, bool, float, type(None), Built, IndexKey})
_LAYOUTS = {f"torch.{name}": Symbol("layout", name) for name in LAYOUTS}
_BY_NAME = {member: Symbol("memory_format", name) for member, name in MEMORY_FORMATS.items()}
_BY_VALUE = tuple(_BY_NAME.values())

METADATA = Record("Metadata")
TENSOR = Record("TensorStorageMetadata", ("properties", "size", "chunks"))
OBJECT = Record("BytesStorageMetadata")
CHUNK = Record("ChunkStorageMetadata", ("offsets", "sizes"))
PROPERTIES = Record("TensorProperties", state_type=tuple)
INDEX = Record("MetadataIndex")
STORAGE_META = Record("StorageMeta")
STORAGE_INFO = Record("_StorageInfo", ("relative_path", "offset", "length"))
SIZE = Call("torch.Size", make_size)
ORDERED_DICT = Call("OrderedDict", lambda: OrderedDict())  # noqa: PLW0108 - it takes no arguments
MEMORY_FORMAT = Call("_MEM_FORMAT_ENCODING", _make_memory_format)

_CHECKPOINT = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"

ALLOWED: dict[tuple[str, str], Record | Call | Symbol] = {
    **{
        (f"{_CHECKPOINT}.metadata", record.name): record
        for record in (METADATA, TENSOR, OBJECT, CHUNK, PROPERTIES, INDEX, STORAGE_META)
    },
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"): MEMORY_FORMAT,
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"): STORAGE_INFO,
    # torch 2.0 to 2.2 kept the properties with its sharded tensors.
    (_SHARDED, "TensorProperties"): PROPERTIES,
    (_SHARDED, "MEM_FORMAT_ENCODING"): MEMORY_FORMAT,
    ("torch", "Size"): SIZE,
    **{("torch", name): Symbol("dtype", name) for name in DTYPES},
    ("torch.serialization", "_get_layout"): Call("a layout", _make_layout),
    # Python 3.13 alone says pathlib._local.
    **{
        (module, f"{pure}{name}Path"): Call("a path", join, copies=True)
        for module in ("pathlib", "pathlib._local")
        for pure in ("", "Pure")
        for name, join in (("Posix", _join_posix), ("Windows", _join_windows))
    },
    ("collections", "OrderedDict"): ORDERED_DICT,
    ("_codecs", "encode"): Call("_codecs.encode", _make_bytes, copies=True),
    # Protocol 2 has Python 2's name of the module.
    **{
        (module, name): stand_in
        for module in ("builtins", "__builtin__")
        for name, stand_in in (
            ("getattr", Call("getattr", _get_member)),
            ("bytes", Call("bytes", lambda: b"")),
            ("bytearray", Call("bytearray", _make_bytearray, copies=True)),
            ("set", Call("set", _make_set, copies=True)),
            ("frozenset", Call("frozenset", make_frozenset, copies=True)),
        )
    },
}
