"""The opcodes of single values in a metadata pickle. A value is written once; later uses refer to it."""

import struct
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from holdfast._format.dtypes import DTYPES
from holdfast._format.pickle_opcodes import PACK_COUNT, encode_int, encode_ints, encode_tuple, tuple_opcodes
from holdfast._format.torch_pickle_names import LAYOUTS, MEMORY_FORMATS
from holdfast._format.torch_pickle_records import Ints, TorchProperties
from holdfast.errors import UsageError

_OF_METADATA = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    *("TensorProperties", "_MEM_FORMAT_ENCODING", "MetadataIndex", "StorageMeta"),
)
_GLOBALS = {
    **dict.fromkeys(_OF_METADATA, b"torch.distributed.checkpoint.metadata"),
    "_StorageInfo": b"torch.distributed.checkpoint.filesystem",
    "_get_layout": b"torch.serialization",
    "Size": b"torch",
}
_FIELDS = ("state_dict_metadata", "storage_data", "fqn", "index", "offset")
_FORMAT_NUMBERS = {name: number for number, name in enumerate(MEMORY_FORMATS.values())}

_FLOAT = struct.Struct(">cd").pack
_COUNT8 = struct.Struct("<cQ").pack
# What stands before and after the members of a container.
_BRACKETS: dict[type, tuple[bytes, bytes]] = {
    list: (b"](", b"e"),
    dict: (b"}(", b"u"),
    OrderedDict: (b"ccollections\nOrderedDict\n)R(", b"u"),
    set: (b"\x8f(", b"\x90"),
    frozenset: (b"(", b"\x91"),
}


def _encode_bytes(value: bytes) -> bytes:
    return (PACK_COUNT(b"B", len(value)) if len(value) < 2**32 else _COUNT8(b"\x8e", len(value))) + value


def size_opcodes(emit: "Emitter", ndim: int) -> tuple[bytes, bytes]:
    """What stands before and after the numbers of a ``torch.Size``."""
    opening, closing = tuple_opcodes(ndim)
    return emit.names["Size"] + opening, closing + b"\x85R"


class Emitter:
    """Knows what the pickle so far holds, so that it is referred to instead of written again.

    A method gives the opcodes that push a value. They must be written in the order in which they were asked
    for, because they may define what later ones refer to.
    """

    def __init__(self) -> None:
        self.texts: dict[str, bytes] = {}
        self.sizes: dict[Ints, bytes] = {}
        self.names: dict[str, bytes] = {}
        self._properties: dict[TorchProperties, bytes] = {}
        self._count = 0

    def prologue(self) -> bytes:
        """Define every class and every field's name, and leave nothing on the stack.

        Their references are one byte long, whatever the size of the checkpoint.
        """
        parts = []
        for name, module in _GLOBALS.items():
            parts.append(b"c%b\n%b\n\x940" % (module, name.encode()))
            self.names[name] = self._next_reference()
        parts += [self.text(field) + b"0" for field in _FIELDS]
        return b"".join(parts)

    def _next_reference(self) -> bytes:
        number = self._count
        self._count += 1
        return b"h%c" % number if number < 256 else PACK_COUNT(b"j", number)

    def text(self, value: str) -> bytes:
        """The opcodes of a str."""
        return self.texts.get(value) or self.new_text(value)

    def new_text(self, value: str) -> bytes:
        """The opcodes of a str that is written for the first time; whether it is, is not checked."""
        # As Python's picklers do: a lone surrogate is kept.
        raw = value.encode("utf-8", "surrogatepass")
        self.texts[value] = self._next_reference()
        if len(raw) < 256:
            return b"\x8c%c%b\x94" % (len(raw), raw)
        return PACK_COUNT(b"X", len(raw)) + raw + b"\x94"

    def size(self, dims: Ints) -> bytes:
        """The opcodes of a ``torch.Size``."""
        known = self.sizes.get(dims)
        if known is None:
            self.sizes[dims] = self._next_reference()
            known = self.names["Size"] + encode_ints(dims) + b"\x85R\x94"
        return known

    def properties(self, value: TorchProperties) -> bytes:
        """The opcodes of a ``TensorProperties``; raises UsageError if torch cannot have these values."""
        known = self._properties.get(value)
        if known is None:
            dtype, layout, requires_grad, memory_format, pin_memory = value
            if dtype not in DTYPES or layout not in LAYOUTS or memory_format not in _FORMAT_NUMBERS:
                raise UsageError(
                    f"torch's metadata cannot hold a tensor with {tuple(value)!r}: expected a dtype of "
                    f"torch, a layout ({', '.join(LAYOUTS)}), and a format ({', '.join(_FORMAT_NUMBERS)}).",
                    found=tuple(value),
                )
            names, number = self.names, encode_int(_FORMAT_NUMBERS[memory_format])
            parts = (
                *(names["TensorProperties"], b")\x81(ctorch\n%b\n" % dtype.encode()),
                *(names["_get_layout"], self.text(f"torch.{layout}"), b"\x85R"),
                self._scalar(requires_grad),
                *(names["_MEM_FORMAT_ENCODING"], number, b"\x85R"),
                self._scalar(pin_memory),
            )
            known = b"".join((*parts, b"tb\x94"))
            self._properties[value] = self._next_reference()
        return known

    def plain(self, value: Any) -> bytes:
        """The opcodes of plain data. Subclasses become their plain base; anything else raises UsageError."""
        kind = type(value)
        if kind is str:
            return self.text(value)
        if kind is tuple:
            return self.plain_tuple(value)
        if kind in _BRACKETS:
            opening, closing = _BRACKETS[kind]
            members = self.plain_pairs(value) if closing == b"u" else map(self.plain, value)
            return b"".join((opening, *members, closing))
        return self._scalar(value)

    def plain_pairs(self, value: dict[Any, Any]) -> Iterator[bytes]:
        """The opcodes of each key and its value, to be set in a dict."""
        texts, plain, plain_tuple = self.texts, self.plain, self.plain_tuple
        for key, item in value.items():
            known = texts.get(key) if type(key) is str else None
            name = known or plain(key)
            if type(item) is not tuple:
                yield name + plain(item)
            elif known and len(item) == 1 and item[0] is key:
                # The path of a key that stands at the top of the state.
                yield b"%b%b\x85" % (known, known)
            else:
                yield name + plain_tuple(item)

    def plain_tuple(self, items: tuple[Any, ...]) -> bytes:
        """The opcodes of a tuple of plain data."""
        # Nearly all planner data are tuples of texts that were seen before.
        texts = self.texts
        return encode_tuple(
            [
                (texts.get(item) or self.text(item)) if type(item) is str else self.plain(item)
                for item in items
            ]
        )

    def _scalar(self, value: Any) -> bytes:
        kind = type(value)
        if kind is int:
            return encode_int(value)
        if value is None:
            return b"N"
        if kind is bool:
            return b"\x88" if value else b"\x89"
        if kind is float:
            return _FLOAT(b"G", value)
        if kind is bytes:
            return _encode_bytes(value)
        if kind is bytearray:
            return b"cbuiltins\nbytearray\n" + _encode_bytes(bytes(value)) + b"\x85R"
        for base in (OrderedDict, dict, list, tuple):
            if isinstance(value, base):
                return self.plain(base(value))
        if isinstance(value, str):
            return self.text(str.__str__(value))
        raise UsageError(
            f"planner_data holds a {kind.__module__}.{kind.__qualname__}, which would have to be run on "
            "load; expected None, bool, int, float, str, bytes, bytearray, dict, list, tuple or set.",
            found=kind,
        )
