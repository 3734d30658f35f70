"""The outer structure of a zstd stream (RFC 8878): where frames and blocks begin and end.

Nothing here inflates or raises: these functions state what the bytes say, the reader judges it.
"""

from dataclasses import dataclass
from enum import IntEnum

MAGIC_NBYTES = 4
DATA_MAGIC = 0xFD2FB528
SKIPPABLE_MAGIC = 0x184D2A50
SKIPPABLE_MASK = 0xFFFFFFF0
SKIPPABLE_HEADER_NBYTES = 8
BLOCK_HEADER_NBYTES = 3
CHECKSUM_NBYTES = 4
MAX_BLOCK_NBYTES = 128 << 10
"""No block of any frame holds or yields more than this."""

_CONTENT_SIZE_NBYTES = (0, 2, 4, 8)
_DICTIONARY_ID_NBYTES = (0, 1, 2, 4)


@dataclass(frozen=True)
class FrameHeader:
    """What a data frame says about itself before its first block."""

    window_nbytes: int
    """How far back the frame refers: the memory that inflating it takes."""
    content_nbytes: int | None
    """The length of the inflated frame, where it is declared."""
    dictionary_id: int
    """0: none needed."""
    has_checksum: bool
    uses_reserved_bit: bool


class BlockKind(IntEnum):
    """How a block's bytes are stored."""

    RAW = 0
    RLE = 1
    COMPRESSED = 2
    RESERVED = 3


@dataclass(frozen=True)
class BlockHeader:
    """What the three bytes before a block say."""

    kind: BlockKind
    size: int
    """For RLE the length it yields, otherwise the length it is stored in."""
    last: bool

    @property
    def stored_nbytes(self) -> int:
        """Bytes in the stream after the block's header."""
        return 1 if self.kind is BlockKind.RLE else self.size

    @property
    def only_ends_the_frame(self) -> bool:
        """An empty last block, as a writer leaves behind that was flushed before it was closed."""
        return self.last and self.kind is not BlockKind.COMPRESSED and self.size == 0


def frame_header_nbytes(descriptor: int) -> int:
    """The length of a data frame's header, magic included, by its fifth byte."""
    single_segment = bool(descriptor & 0x20)
    content_size_flag = descriptor >> 6
    content_size_nbytes = _CONTENT_SIZE_NBYTES[content_size_flag] or int(single_segment)
    window_nbytes = 0 if single_segment else 1
    return 5 + window_nbytes + _DICTIONARY_ID_NBYTES[descriptor & 3] + content_size_nbytes


def parse_frame_header(data: bytes) -> FrameHeader:
    """Read a data frame's header from its exact bytes, ``frame_header_nbytes`` of them."""
    descriptor = data[4]
    single_segment = bool(descriptor & 0x20)
    dictionary_start = 5 if single_segment else 6
    content_start = dictionary_start + _DICTIONARY_ID_NBYTES[descriptor & 3]
    content_nbytes: int | None = None
    if content_start < len(data):
        content_nbytes = int.from_bytes(data[content_start:], "little")
        if len(data) - content_start == 2:
            # Two bytes count from 256 on, since one byte holds everything below.
            content_nbytes += 256
    if single_segment:
        assert content_nbytes is not None
        window_nbytes = content_nbytes
    else:
        exponent, mantissa = data[5] >> 3, data[5] & 7
        window_nbytes = (1 << (10 + exponent)) * (8 + mantissa) // 8
    return FrameHeader(
        window_nbytes=window_nbytes,
        content_nbytes=content_nbytes,
        dictionary_id=int.from_bytes(data[dictionary_start:content_start], "little"),
        has_checksum=bool(descriptor & 0x04),
        uses_reserved_bit=bool(descriptor & 0x08),
    )


def parse_block_header(data: bytes | bytearray, start: int) -> BlockHeader:
    """Read the block header in the three bytes of ``data`` from ``start`` on."""
    word = int.from_bytes(data[start : start + BLOCK_HEADER_NBYTES], "little")
    return BlockHeader(kind=BlockKind(word >> 1 & 3), size=word >> 3, last=bool(word & 1))
