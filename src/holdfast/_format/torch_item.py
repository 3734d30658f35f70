"""Owns the containers that we write around raw bytes so that ``torch.load`` reads them: a head and a tail.

An item is a zip archive without compression. The payload is one run inside it, at an aligned place of the
file, so that any part of it can be read without the container::

    head     small records (the pickle that names dtype and shape, byte order, version), the payload's
             own record header, and padding up to the aligned place
    payload  the raw bytes
    tail     the payload's checksum and size, and the archive's directory

Only the tail needs the payload's CRC-32, so an item is written in one pass. Offsets inside an item count
from its first byte: stock torch opens it through a view of the file that begins there.
"""

import struct
import zlib
from collections.abc import Callable
from functools import lru_cache

from holdfast._format.dtypes import DTYPES, UNTYPED_STORAGE, why_not_stored
from holdfast._format.pickle_opcodes import encode_int, encode_ints
from holdfast._format.torch_item_zip import (
    CENTRAL,
    DATE,
    END,
    FLAG_DESCRIPTOR,
    LOCAL,
    UNSET,
    WIDE_END_NBYTES,
    end_of_directory,
    padding_field,
)
from holdfast._geometry import row_major_strides, volume
from holdfast.errors import UsageError

# One cache line, and what torch itself keeps; a page where direct reads and memory maps want one. Half a
# page of padding is under 0.4 % of what it is paid for.
SMALL_ALIGNMENT = 64
LARGE_ALIGNMENT = 4096
LARGE_FROM = 1024 * 1024

# Archives with offsets or sizes near 4 GiB use the 64-bit fields throughout. The head takes less than 64 KiB,
# so below this no offset in the archive can reach 4 GiB.
WIDE_FROM = 2**32 - 2**17


class ItemFrame:
    """The container of one payload, for any place in a file.

    Frames depend on where the item starts, because of the padding, so every method takes ``position``: the
    offset in the file of the item's first byte. The same instance serves any number of items of its kind.

    Args:
        records: Small records that stand before the payload's, as (name, content).
        name: The payload's record.
        payload_nbytes: How many raw bytes the record holds.
        before: What stands in the record before the payload.
        after: What stands in the record after the payload.
        combine: Gives the CRC-32 of two joined runs from theirs and the second's length; needed only with
            ``before``.
    """

    def __init__(
        self,
        records: list[tuple[bytes, bytes]],
        name: bytes,
        payload_nbytes: int,
        *,
        before: bytes = b"",
        after: bytes = b"",
        combine: Callable[[int, int, int], int] | None = None,
    ) -> None:
        nbytes = len(before) + payload_nbytes + len(after)
        wide = nbytes >= WIDE_FROM
        lead = directory = b""
        for record_name, content in records:
            facts = (0, 0, 0, DATE, zlib.crc32(content), len(content), len(content), len(record_name))
            directory += CENTRAL.pack(b"PK\1\2", 45, 20, *facts, 0, 0, 0, 0, 0, len(lead)) + record_name
            lead += LOCAL.pack(b"PK\3\4", 20, *facts, 0) + record_name + content
        version, size = (45, UNSET) if wide else (20, nbytes)
        extra = struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if wide else b""
        header = LOCAL.pack(b"PK\3\4", version, FLAG_DESCRIPTOR, 0, 0, DATE, 0, 0, 0, len(name), 0)
        if wide:
            # Says that the sizes behind the record are 64 bits wide; they are given there, like the others.
            header = header[:18] + struct.pack("<2L", UNSET, UNSET) + header[26:]
        facts = (FLAG_DESCRIPTOR, 0, 0, DATE, 0, size, size, len(name))
        entry = CENTRAL.pack(b"PK\1\2", 45, version, *facts, len(extra), 0, 0, 0, 0, len(lead)) + name + extra
        # The CRC-32 goes between the two parts, see tail().
        self._directory = directory + entry[:16], entry[20:]
        self._end = len(records) + 1, len(directory) + len(entry)
        self._lead = lead + header[:28]
        self._header = name + (struct.pack("<2H2Q", 1, 16, 0, 0) if wide else b"")
        self._descriptor = struct.pack("<2Q" if wide else "<2L", nbytes, nbytes)
        self._alignment = LARGE_ALIGNMENT if payload_nbytes >= LARGE_FROM else SMALL_ALIGNMENT
        self._unpadded = len(self._lead) + 2 + len(self._header) + len(before)
        self._before, self._after, self._combine, self._wide = before, after, combine, wide
        self.payload_nbytes = payload_nbytes
        end_nbytes = END.size + (WIDE_END_NBYTES if wide else 0)
        self.tail_nbytes = len(after) + 8 + len(self._descriptor) + self._end[1] + end_nbytes

    def payload_offset(self, position: int) -> int:
        """The number of bytes of the item before its payload."""
        return self._unpadded + len(padding_field(position + self._unpadded, self._alignment))

    def nbytes(self, position: int) -> int:
        """The number of bytes of the whole item."""
        return self.payload_offset(position) + self.payload_nbytes + self.tail_nbytes

    def head(self, position: int) -> bytes:
        """Everything before the payload; the payload begins at an aligned place of the file."""
        filling = padding_field(position + self._unpadded, self._alignment)
        extra_nbytes = len(filling) + (20 if self._wide else 0)
        return b"".join((self._lead, extra_nbytes.to_bytes(2, "little"), self._header, filling, self._before))

    def tail(self, position: int, crc32: int) -> bytes:
        """Everything after the payload, whose CRC-32 is given."""
        if self._before:
            assert self._combine is not None
            crc32 = self._combine(zlib.crc32(self._before), crc32, self.payload_nbytes)
        checksum = zlib.crc32(self._after, crc32).to_bytes(4, "little")
        return checksum.join(self.tail_around_checksums(position))

    def tail_around_checksums(self, position: int) -> tuple[bytes, bytes, bytes]:
        """The three parts of the tail between and around which the record's CRC-32 stands, twice.

        They are the same for all items of a kind that begin equally far from an aligned place.
        """
        directory_at = (
            self.payload_offset(position) + self.payload_nbytes + len(self._after) + 8 + len(self._descriptor)
        )
        first, second = self._directory
        end = end_of_directory(*self._end, directory_at, wide=self._wide)
        return self._after + b"PK\7\x08", self._descriptor + first, second + end


# Models repeat their shapes layer by layer: building costs 9 microseconds, finding a built one 0.1.
@lru_cache(maxsize=4096)
def tensor_item(dtype: str, shape: tuple[int, ...]) -> ItemFrame:
    """The item of a tensor whose payload is its elements in row-major order, little-endian.

    ``torch.load(..., weights_only=True)`` gives a contiguous tensor on the CPU without gradient.

    Raises:
        UsageError: torch has no way to store this dtype in such an item.
    """
    pickled = _tensor_pickle(dtype, shape)
    records = [(b"a/data.pkl", pickled), (b"a/byteorder", b"little"), (b"a/version", b"3\n")]
    return ItemFrame(records, b"a/data/0", volume(shape) * DTYPES[dtype].itemsize)


def bytes_item(
    nbytes: int, *, combine: Callable[[int, int, int], int], kind: type[bytes] | type[bytearray] = bytes
) -> ItemFrame:
    """The item of a ``bytes`` or ``bytearray`` object; the payload is its content.

    ``torch.load(..., weights_only=False)`` gives the object back. The weights-only unpickler knows no
    opcode for bytes and refuses it.
    """
    # PROTO, then BINBYTES8 or BYTEARRAY8 with the length; STOP comes after the content.
    opening = b"\x80\x05\x96" if kind is bytearray else b"\x80\x04\x8e"
    before = opening + nbytes.to_bytes(8, "little")
    return ItemFrame(
        [(b"a/version", b"3\n")], b"a/data.pkl", nbytes, before=before, after=b".", combine=combine
    )


@lru_cache(maxsize=64)
def _around_numbers(dtype: str) -> tuple[bytes, bytes]:
    """The parts of a tensor's pickle before and after its numbers, which depend on the dtype alone."""
    if why := why_not_stored(dtype):
        raise UsageError(why, found=dtype)
    storage = DTYPES[dtype].storage
    is_untyped = storage == UNTYPED_STORAGE
    rebuild, module = ("3", "torch.storage") if is_untyped else ("2", "torch")
    before = (
        f"\x02ctorch._utils\n_rebuild_tensor_v{rebuild}\n((X\7\0\0\0storagec{module}\n{storage}\n"
        "X\1\0\0\x000X\3\0\0\0cpu"
    )
    # No gradient, and a dict of no hooks; the dtype where the storage does not tell.
    named = f"ctorch\n{dtype}\n" if is_untyped else ""
    return b"\x80" + before.encode(), b"\x89ccollections\nOrderedDict\n)R" + named.encode() + b"tR."


def _tensor_pickle(dtype: str, shape: tuple[int, ...]) -> bytes:
    """What torch's pickler writes for the tensor, without the memo that nothing refers to."""
    before, after = _around_numbers(dtype)
    # An untyped storage counts bytes.
    count = volume(shape) * (DTYPES[dtype].itemsize if DTYPES[dtype].storage == UNTYPED_STORAGE else 1)
    # The storage is complete; the tensor starts at its element 0.
    strides = row_major_strides(shape)
    return b"".join((before, encode_int(count), b"tQK\0", encode_ints(shape), encode_ints(strides), after))
