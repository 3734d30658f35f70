"""Where one item of a checkpoint lies: what a file storage keeps for each in ``Metadata.storage_data``."""

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast._io.blocks import BLOCK_SIZE

__all__ = ["StorageInfo"]


@dataclass
class StorageInfo:
    """The place of one item; the first four fields are torch's, the others let us check what we read.

    Attributes:
        relative_path: The file's name in the checkpoint.
        offset: Where the item begins in the file.
        length: How many bytes it takes there.
        transform_descriptors: The stream transforms, in the order in which a reader undoes them.
        payload_offset: Where the checked bytes begin, from the item's beginning. For a tensor without
            transforms they are its elements, row-major.
        payload_nbytes: How many they are; -1 for an item that torch wrote, where neither place nor
            checksums are recorded.
        raw_nbytes: The item's length once the transforms are undone; -1 if unknown.
        checksums: CRC-32 of each block of the checked bytes, little-endian, 4 bytes each.
        wrap_checksum: CRC-32 of the item's other bytes.
        block_size: How many bytes a block has.
    """

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str] | None = None
    payload_offset: int = 0
    payload_nbytes: int = -1
    raw_nbytes: int = -1
    checksums: bytes = b""
    wrap_checksum: int = 0
    block_size: int = BLOCK_SIZE

    @property
    def is_checked(self) -> bool:
        """Whether checksums are known: False for what torch wrote."""
        return self.payload_nbytes >= 0
