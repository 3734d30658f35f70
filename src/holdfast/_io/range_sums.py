"""Owns checksums of payloads of which nobody has all: each process sums the ranges that it has.

A CRC-32 without its first and last inversion is linear: that of a block is the exclusive or of those of its
ranges, each with zeros in the place of all other bytes. So processes sum what they have, in any order, and
one of them joins the sums, without having seen the bytes.
"""

from array import array
from collections.abc import Iterable
from functools import lru_cache

from holdfast._io.blocks import BLOCK_SIZE, block_count, crc32, crc32_combine


class RangeSums:
    """The sums of some ranges of a payload, by its blocks.

    Args:
        nbytes: The size of the payload.
        first: The first byte that will come.
        last: The last byte that will come, or any byte after that.
        block_size: The size of a block.

    Attributes:
        block_size: The size of a block.
        first_block: The number of the block that ``sums`` begins with.
        sums: One sum for each block from there on.
    """

    def __init__(self, nbytes: int, first: int, last: int, block_size: int = BLOCK_SIZE) -> None:
        self._nbytes = nbytes
        self.block_size = block_size
        self.first_block = first // block_size
        self.sums = array("I", [0]) * (last // block_size - self.first_block + 1)

    def add(self, start: int, view: memoryview) -> None:
        """Take bytes of the payload, from ``start`` on. No byte may come twice."""
        at = 0
        while at < len(view):
            number, inside = divmod(start + at, self.block_size)
            end = min((number + 1) * self.block_size, self._nbytes)
            piece = view[at : at + end - (start + at)]
            plain = crc32(piece) ^ _crc_of_zeros(len(piece))
            # What follows in the block counts as zeros; what stands before makes no difference.
            following = end - (number * self.block_size + inside + len(piece))
            self.sums[number - self.first_block] ^= crc32_combine(plain, 0, following) if following else plain
            at += len(piece)


def join_sums(nbytes: int, parts: Iterable[tuple[int, bytes]], block_size: int = BLOCK_SIZE) -> bytes:
    """The CRC-32 of each block of a payload, from the sums of all its ranges.

    Args:
        nbytes: The size of the payload.
        parts: For each ``RangeSums`` its ``first_block``, and its ``sums`` as bytes.
        block_size: The size of a block.
    """
    count = block_count(nbytes, block_size)
    joined = bytearray(array("I", [_crc_of_zeros(block_size)]) * count)
    if count:
        last = nbytes - (count - 1) * block_size
        joined[-4:] = _crc_of_zeros(last).to_bytes(4, "little")
    for first_block, sums in parts:
        span = slice(4 * first_block, 4 * first_block + len(sums))
        together = int.from_bytes(joined[span], "little") ^ int.from_bytes(sums, "little")
        joined[span] = together.to_bytes(len(sums), "little")
    return bytes(joined)


@lru_cache(maxsize=4096)
def _crc_of_zeros(nbytes: int) -> int:
    return crc32(bytes(nbytes))
