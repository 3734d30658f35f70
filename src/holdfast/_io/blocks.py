"""Owns checksums: CRC-32 of every block of a payload, and the whole payload's CRC-32 made from them.

A payload is cut into blocks of ``block_size`` bytes, counted from its own start; the last block may be
short. All CRC work is done in steps of at most 1 MiB, so that the bytes are still in cache for the copy
or the read that happens beside it.
"""

import contextlib
import ctypes
import zlib
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache

from holdfast.errors import ChecksumError, MetadataFormatError, UsageError

BLOCK_SIZE = 1 << 20
"""The usual block. Its size is recorded with a checkpoint, so that it can grow with it."""

STEP = 1 << 20
"""Bytes handled at a time: half of a common 2 MiB level-2 cache."""

# What ``zlib.crc32`` returns. Bound itself rather than wrapped: a wrapper doubles its time on small data.
crc32: Callable[..., int] = zlib.crc32
_fast_combine: Callable[[int, int, int], int] | None = None
try:
    from isal import isal_zlib
except ImportError:
    pass
else:
    # 10.8 GB/s a core where zlib does 3.7; both release the GIL.
    crc32, _fast_combine = isal_zlib.crc32, isal_zlib.crc32_combine

_CrcWithLock = ctypes.PYFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint64)
_crc32_with_lock: Callable[[int, int, int], int] | None = None
if _fast_combine is not None:
    # A build of isal may keep the function to itself.
    with contextlib.suppress(AttributeError, OSError, TypeError):
        _crc32_with_lock = _CrcWithLock(("crc32_gzip_refl", ctypes.PyDLL(isal_zlib.__file__)))

_POLYNOMIAL = 0xEDB88320  # CRC-32's, in reflected bit order: the highest bit is x**0
_ONE = 1 << 31
_X8 = 1 << 23  # x**8: appending one zero byte multiplies by it


def crc32_in_one_turn(view: memoryview, crc: int = 0) -> int:
    """The CRC-32 of ``view``, continued from ``crc``. It keeps the interpreter's lock if isal is there.

    A checksum of 1 MiB takes 15 to 100 microseconds. ``crc32`` lets go of the lock for that time, and beside
    a loop that never leaves Python it waits for a whole turn of that loop to get it back. Read-only memory
    still goes to ``crc32``, because Python does not tell its address.
    """
    if _crc32_with_lock is None or view.readonly or not view.contiguous:
        return crc32(view, crc)
    memory = ctypes.c_char.from_buffer(view)  # keeps it in its place until the call returns
    return _crc32_with_lock(crc, ctypes.addressof(memory), view.nbytes)


def crc32_combine(crc1: int, crc2: int, len2: int) -> int:
    """The CRC-32 of two pieces in a row, from that of each and the second one's length in bytes."""
    if _fast_combine is not None:
        return _fast_combine(crc1, crc2, len2)
    return _multiply(_shift(len2), crc1) ^ crc2


def combine_blocks(crcs: Sequence[int], nbytes: int, block_size: int = BLOCK_SIZE) -> int:
    """The CRC-32 of a payload of ``nbytes`` from those of its blocks.

    Costs a microsecond a block with isal and about ten without it: milliseconds for 2 GiB at 1 MiB.

    Raises:
        MetadataFormatError: There are not exactly as many checksums as blocks.
    """
    check_block_table(crcs, nbytes, block_size)
    whole = 0
    for index, crc in enumerate(crcs):
        whole = crc32_combine(whole, crc, min(block_size, nbytes - index * block_size))
    return whole


def block_count(nbytes: int, block_size: int = BLOCK_SIZE) -> int:
    """How many blocks a payload of ``nbytes`` has. An empty one has none."""
    if block_size < 1:
        raise UsageError(f"A block size must be 1 or more bytes, not {block_size}.", found=block_size)
    return -(-nbytes // block_size)


def block_checksums(buffer: "bytes | bytearray | memoryview", block_size: int = BLOCK_SIZE) -> "array[int]":
    """The CRC-32 of each block of ``buffer``."""
    sums = BlockSums(block_size)
    sums.update(memoryview(buffer).cast("B") if len(buffer) else memoryview(b""))
    return sums.finish()


class BlockSums:
    """The checksums of a payload's blocks, made from pieces of any size, in order."""

    def __init__(self, block_size: int = BLOCK_SIZE) -> None:
        block_count(0, block_size)
        self.block_size = block_size
        self.crcs: array[int] = array("I")
        self._crc = 0
        self._filled = 0

    def update(self, piece: memoryview) -> None:
        """Take the next bytes of the payload."""
        at = 0
        while at < len(piece):
            step = min(STEP, self.block_size - self._filled, len(piece) - at)
            self._crc = crc32_in_one_turn(piece[at : at + step], self._crc)
            self._filled += step
            at += step
            if self._filled == self.block_size:
                self._end_block()

    def finish(self) -> "array[int]":
        """The payload is complete: close its last, short block, and return all checksums."""
        if self._filled:
            self._end_block()
        return self.crcs

    def _end_block(self) -> None:
        self.crcs.append(self._crc)
        self._crc = self._filled = 0


class BlockChecker(BlockSums):
    """Compares a run of blocks with the recorded checksums while the bytes pass by.

    Args:
        crcs: The recorded checksums of exactly these blocks.
        block_size: Their size; the last one may turn out shorter.
        path: The file that they come from, for the message.
        offset: Where in the file the first of them begins, for the message.
    """

    def __init__(self, crcs: Sequence[int], block_size: int, *, path: str, offset: int) -> None:
        super().__init__(block_size)
        self._recorded = crcs
        self._path = path
        self._offset = offset

    def update(self, piece: memoryview) -> None:
        """Take the next bytes; raises ChecksumError at the first block that differs.

        Several whole blocks are compared at once, by the checksum that theirs make together. That is one
        call instead of one for each block, and so fewer exchanges of the interpreter's lock between threads:
        two threads of a load from memory waited 200 times for it, now 20.
        """
        count = len(piece) // self.block_size
        recorded = self._recorded[len(self.crcs) : len(self.crcs) + count]
        if count > 1 and self._filled == 0 and len(recorded) == count:
            nbytes = count * self.block_size
            if crc32(piece[:nbytes]) == combine_blocks(recorded, nbytes, self.block_size):
                self.crcs.extend(recorded)
                piece = piece[nbytes:]
        super().update(piece)

    def _end_block(self) -> None:
        index = len(self.crcs)
        found, expected, nbytes = self._crc, self._recorded[index], self._filled
        super()._end_block()
        if found != expected:
            start = self._offset + index * self.block_size
            raise ChecksumError(
                f"{self._path}: the bytes {start} to {start + nbytes} are not the ones that were written: "
                f"their CRC-32 is {found:#010x}, the recorded one is {expected:#010x}. The file was changed "
                "or damaged after it was saved; take another copy of it, or another checkpoint.",
                path=self._path,
                expected=expected,
                found=found,
            )


def check_block_table(crcs: Sequence[int], nbytes: int, block_size: int, *, path: str = "A payload") -> None:
    """Raise MetadataFormatError unless there are as many checksums as a payload of ``nbytes`` has blocks."""
    expected = block_count(nbytes, block_size)
    if len(crcs) != expected:
        raise MetadataFormatError(
            f"{path}: {nbytes} bytes in blocks of {block_size} have {expected} checksums, but {len(crcs)} "
            "are recorded. The metadata is damaged.",
            path=path,
            expected=expected,
            found=len(crcs),
        )


@lru_cache(maxsize=64)
def _shift(nbytes: int) -> int:
    """The polynomial x ** (8 * nbytes): the factor by which ``nbytes`` zero bytes change a CRC.

    Kept, because nearly every block of a checkpoint has one length: a combination is then a single
    multiplication instead of about forty.
    """
    factor, power = _ONE, _X8
    while nbytes:
        if nbytes & 1:
            factor = _multiply(factor, power)
        power = _multiply(power, power)
        nbytes >>= 1
    return factor


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo CRC-32's."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
