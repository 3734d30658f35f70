"""The safetensors format: the header of a file, built and parsed; dtypes by both of their names.

A file is the length of its header (8 bytes, little-endian), the header (JSON, padded with spaces), and the
elements of the tensors, row-major, one tensor after the other without gaps. Nothing here needs torch: shapes
and dtype names are those that torch has.
"""

import itertools
import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from holdfast._format.dtypes import DTYPES
from holdfast.errors import MetadataFormatError, TruncatedFileError

SUFFIX = ".safetensors"
ALIGNMENT = 4096
"""The elements of the files that we write begin at a multiple of this, for reads past the page cache."""

LENGTH_NBYTES = 8
LARGEST_HEADER = 100_000_000
"""The most bytes that a header may have: a limit of the format itself."""

_MOST_DIMENSIONS = 64
ATTRIBUTES = "__metadata__"

TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}
"""The dtypes of the format by their names there, with torch's. The format's ``F6_*`` are not in torch."""

_FORMAT_NAMES = {name: code for code, name in TORCH_NAMES.items()}
_PACKED = "float4_e2m1fn_x2"
"""torch counts a pair of these numbers as one element, the format counts the numbers."""


class StoredTensor(NamedTuple):
    """One tensor of a file.

    Attributes:
        key: Its name.
        dtype: Torch's name of its dtype.
        shape: Its shape as torch counts it.
        begin: Where its elements begin, counted from the beginning of the file.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return _nbytes(self.dtype, self.shape)


@lru_cache(maxsize=4096)  # models repeat their shapes layer by layer
def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize


class Header(NamedTuple):
    """What the header of a file says.

    Attributes:
        tensors: The tensors, in the order in which their elements lie.
        attributes: What stands in it besides: text by name.
        nbytes: Where the elements begin.
    """

    tensors: list[StoredTensor]
    attributes: dict[str, str]
    nbytes: int


def knows_dtype(name: str) -> bool:
    """Whether the format can keep tensors of a dtype, given by torch's name."""
    return name in _FORMAT_NAMES


def place_tensors(
    tensors: Iterable[StoredTensor], attributes: Mapping[str, str]
) -> tuple[list[StoredTensor], int]:
    """Where each tensor of a file lies, and the size of the file.

    Large elements come before small ones, so that the elements of each tensor are aligned. Attributes of the
    same lengths give the same places.
    """
    ordered = sorted(tensors, key=lambda tensor: -DTYPES[tensor.dtype].itemsize)
    # The header needs only the distances between tensors, which do not depend on its own size.
    starts = itertools.accumulate((tensor.nbytes for tensor in ordered), initial=0)
    placed = [tensor._replace(begin=start) for tensor, start in zip(ordered, starts, strict=False)]
    begin = len(build_header(placed, attributes))
    placed = [tensor._replace(begin=begin + tensor.begin) for tensor in placed]
    return placed, begin + sum(tensor.nbytes for tensor in placed)


def build_header(tensors: Sequence[StoredTensor], attributes: Mapping[str, str]) -> bytes:
    """The beginning of a file, up to its first element.

    Args:
        tensors: The tensors in the order in which they lie, without gaps.
        attributes: Text to keep besides, by name.
    """
    first = tensors[0].begin if tensors else 0
    entries: dict[str, Any] = {ATTRIBUTES: dict(attributes)}
    for key, dtype, shape, begin in tensors:
        start = begin - first
        entries[key] = {
            "dtype": _FORMAT_NAMES[dtype],
            "shape": (*shape[:-1], 2 * shape[-1]) if dtype == _PACKED else shape,
            "data_offsets": (start, start + math.prod(shape) * DTYPES[dtype].itemsize),
        }
    text = msgspec.json.encode(entries)
    padded = -(-(LENGTH_NBYTES + len(text)) // ALIGNMENT) * ALIGNMENT - LENGTH_NBYTES
    return padded.to_bytes(LENGTH_NBYTES, "little") + text.ljust(padded)


def header_nbytes(prefix: bytes | bytearray, file_nbytes: int, *, path: str) -> int:
    """The bytes of a header with its length, given the first 8 bytes of the file.

    Raises:
        TruncatedFileError: The file ends before that.
        MetadataFormatError: No header is that long.
    """
    length = int.from_bytes(prefix[:LENGTH_NBYTES], "little")
    if len(prefix) < LENGTH_NBYTES or (length <= LARGEST_HEADER and LENGTH_NBYTES + length > file_nbytes):
        raise TruncatedFileError(
            f"{path}: has {file_nbytes} bytes, and its header alone needs {LENGTH_NBYTES + length}. It was "
            "cut short; take another copy of it.",
            path=path,
            expected=LENGTH_NBYTES + length,
            found=file_nbytes,
        )
    if not 2 <= length <= LARGEST_HEADER:
        raise _damaged(path, f"its header has {length} bytes, and must have 2 to {LARGEST_HEADER}")
    return LENGTH_NBYTES + length


def parse_header(data: bytes | bytearray, file_nbytes: int, *, path: str) -> Header:
    """What the beginning of a file says, checked so that nobody after this needs to.

    Args:
        data: The beginning, as long as ``header_nbytes`` says.
        file_nbytes: The size of the file.
        path: Where it was found, for errors.

    Raises:
        TruncatedFileError: The file ends before its last tensor does.
        MetadataFormatError: It does not describe a file: dtypes or shapes that cannot be, tensors that
            overlap, gaps between them.
    """
    try:
        text = bytes(memoryview(data)[LENGTH_NBYTES:])
        entries = msgspec.json.decode(text, type=dict[str, _Entry])
        attributes = msgspec.json.decode(text, type=_Attributes).attributes
        strings = _STRINGS * len(entries)
        if entries.pop(ATTRIBUTES, None) is not None:
            strings += 1 + 2 * len(attributes) - _STRINGS
        refuse_doubles(text, strings)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    found = [
        (at, key, entry) for key, entry in entries.items() if not isinstance(at := entry.data_offsets, str)
    ]
    if len(found) < len(entries):
        raise _damaged(path, "one of its tensors has no data_offsets")
    found.sort(key=operator.itemgetter(0))
    tensors, end, start = [], 0, len(data)
    for (begin, stop), key, entry in found:
        try:
            dtype, shape, nbytes = _as_torch(entry.dtype, entry.shape)
        except ValueError as error:
            raise _damaged(path, f"{key} {error}", key) from error
        if begin != end:
            what = "overlaps the tensor before it" if begin < end else "leaves a gap after the one before it"
            raise _damaged(path, f"{key} at {begin} {what}, which ends at {end}", key)
        end = stop
        if end - begin != nbytes:
            what = f"{key} of shape {list(entry.shape)} of {entry.dtype} takes {nbytes} bytes"
            raise _damaged(path, f"{what}, and has {end - begin}", key)
        tensors.append(StoredTensor(key, dtype, shape, start + begin))
    _check_end(len(data) + end, file_nbytes, tensors, path)
    return Header(tensors, attributes, len(data))


def refuse_doubles(text: bytes | bytearray, strings: int) -> None:
    """Raise ValueError if JSON has a key twice: readers differ in which of the two they take.

    Args:
        text: The JSON.
        strings: How many strings it has if it has no key twice. Counting their quotes takes a tenth of the
            time of looking at all keys, which is done only if there are more, or escaped ones.
    """
    if b"\\" in text or text.count(b'"') != 2 * strings:
        json.loads(bytes(text), object_pairs_hook=_without_doubles)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return found


class _Entry(msgspec.Struct):
    """A tensor. What is not there is "". The attributes are read as one, too, and may have any text."""

    dtype: str = ""
    shape: tuple[int, ...] | str = ""
    data_offsets: tuple[int, int] | str = ""


_STRINGS = 5
"""The strings of a tensor: its key, the names of its fields, and its dtype."""


class _Attributes(msgspec.Struct):
    attributes: dict[str, str] = msgspec.field(name=ATTRIBUTES, default_factory=dict)


@lru_cache(maxsize=4096)  # models repeat their shapes layer by layer
def _as_torch(code: str, shape: tuple[int, ...] | str) -> tuple[str, tuple[int, ...], int]:
    """Torch's dtype, shape and size of a tensor, from those of the format; ValueError if there are none."""
    name = TORCH_NAMES.get(code)
    if name is None or isinstance(shape, str):
        raise ValueError("has no shape" if name else f"has the dtype {code!r}, which torch does not have")
    if len(shape) > _MOST_DIMENSIONS or min(shape, default=0) < 0 or math.prod(shape) >= 1 << 60:
        raise ValueError(f"has an impossible shape {list(shape)}")
    if name == _PACKED:
        if not shape or shape[-1] % 2:
            raise ValueError(f"has half a byte left over: its shape is {list(shape)} of F4")
        shape = (*shape[:-1], shape[-1] // 2)
    return name, shape, _nbytes(name, shape)


def _check_end(end: int, file_nbytes: int, tensors: Sequence[StoredTensor], path: str) -> None:
    if end > file_nbytes:
        key = tensors[-1].key
        raise TruncatedFileError(
            f"{path}: has {file_nbytes} bytes, and its tensors, of which {key} is the last, reach to {end}. "
            "It was cut short; take another copy of it.",
            key=key,
            path=path,
            expected=end,
            found=file_nbytes,
        )
    if end < file_nbytes:
        raise _damaged(path, f"its tensors end at {end}, and it has {file_nbytes} bytes")


def _damaged(path: str, problem: str, key: str | None = None) -> MetadataFormatError:
    return MetadataFormatError(f"{path} is not a safetensors file: {problem}", path=path, key=key)
