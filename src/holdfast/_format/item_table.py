"""Owns what is known of a stored item: one declaration, from which columns, records and checks are made.

A stored item is a run of bytes in a data file that holds one chunk of a tensor, or one object. Each field of
:class:`StorageInfo` is one fact about it, and says which column keeps that fact for all items. A new field is
one line there. The writer of items fills its column, or else every item has the field's default.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from holdfast._format.description import ints


class Column(NamedTuple):
    """How one field is kept for all items: one number for each.

    Attributes:
        name: The column's name; in the manifest ``item_`` stands before it.
        typecode: ``q`` for integers of 64 bits that are never negative, ``I`` for unsigned ones of 32 bits.
        listed_in: The manifest's list that the numbers of this column refer to; None for plain numbers.
        may_be_left_out: Whether an empty column means that every number is 0.
    """

    name: str
    typecode: Literal["q", "I"]
    listed_in: str | None = None
    may_be_left_out: bool = False

    @property
    def in_manifest(self) -> str:
        """The column's name in the manifest."""
        return f"item_{self.name}"


class Payload(NamedTuple):
    """Bytes of a file that were saved together, with the checksums of their blocks.

    Attributes:
        offset: Where in the file they begin.
        nbytes: How many they are.
        crcs: The CRC-32 of each block.
        block_size: The size of these blocks.
    """

    offset: int
    nbytes: int
    crcs: Sequence[int]
    block_size: int = 1 << 20


@dataclasses.dataclass
class StorageInfo:
    """One stored item; the first four fields are torch's, the others let us check what we read.

    A field without a default is known of every item, also of those that torch wrote.

    Attributes:
        relative_path: The name of the item's file in the checkpoint.
        offset: Where the item begins in the file.
        length: How many bytes it takes there, container included.
        transform_descriptors: The stream transforms, in the order in which a reader undoes them; None if
            there are none.
        payload_offset: Where the checked bytes begin, from the item's beginning. For a tensor without
            transforms they are its elements, row-major.
        payload_nbytes: How many they are; -1 for an item that torch wrote, where neither place nor
            checksums are recorded.
        raw_nbytes: The item's length once its transforms are undone; -1 if unknown.
        checksums: The checksum of each block of the checked bytes, little-endian, 4 bytes each. The column
            has the number of blocks; the checksums of all items stand one after the other.
        wrap_checksum: The checksum of the item's other bytes: those before the payload, then those after.
        save_id: The save that wrote the item; None for the save that made the checkpoint.
        block_size: How many bytes a block has; the same for all items.
    """

    relative_path: Annotated[str, Column("files", "I", listed_in="file_names")]
    offset: Annotated[int, Column("offsets", "q")]
    length: Annotated[int, Column("nbytes", "q")]
    transform_descriptors: Annotated[
        Sequence[str] | None, Column("transforms", "I", listed_in="transforms")
    ] = None
    payload_offset: Annotated[int, Column("payload_offsets", "q")] = 0
    payload_nbytes: Annotated[int, Column("payload_nbytes", "q")] = -1
    raw_nbytes: Annotated[int, Column("raw_nbytes", "q")] = -1
    checksums: Annotated[bytes, Column("blocks", "I")] = b""
    wrap_checksum: Annotated[int, Column("wrap_checksums", "I")] = 0
    save_id: Annotated[str | None, Column("saves", "I", listed_in="saves", may_be_left_out=True)] = None
    block_size: int = 1 << 20

    def __eq__(self, other: object) -> bool:
        """Whether all fields are equal; of torch's record those that it has."""
        if type(other).__name__ == "_StorageInfo":
            return all(vars(self)[name] == vars(other).get(name) for name in _FIELDS_OF_TORCH)
        return vars(self) == vars(other) if isinstance(other, StorageInfo) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @property
    def end(self) -> int:
        """Where the item ends in the file."""
        return self.offset + self.length

    @property
    def payload(self) -> Payload:
        """The checked bytes and their place in the file."""
        offset = self.offset + self.payload_offset
        return Payload(offset, self.payload_nbytes, ints(self.checksums, "I"), self.block_size)

    @property
    def is_located(self) -> bool:
        """Whether the place of the payload is known: False for what torch wrote."""
        return self.payload_nbytes >= 0

    @property
    def is_raw(self) -> bool:
        """Whether the payload of a tensor is known to be its elements, row-major."""
        return self.is_located and not self.transform_descriptors

    @property
    def is_checked(self) -> bool:
        """Whether checksums are known: False for what torch wrote, and for safetensors files of others."""
        return self.payload_nbytes == 0 or bool(self.checksums)


_FIELDS_OF_TORCH = [field.name for field in dataclasses.fields(StorageInfo)[:4]]

COLUMNS: dict[str, Column] = {
    field.name: get_args(field.type)[1]
    for field in dataclasses.fields(StorageInfo)
    if get_origin(field.type) is Annotated
}
"""The column of each field of :class:`StorageInfo`, in its order."""

_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(StorageInfo)}


def default_number(field: str) -> int:
    """What a column has for an item of which the field is not known.

    Of a list that numbers refer to, the first entry stands for that.
    """
    default = _DEFAULTS[field]
    return default if isinstance(default, int) else 0
