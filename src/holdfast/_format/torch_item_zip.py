"""Owns reading the zip archive of an item: its directory and small records, never its payload.

Knows what torch and we write: records stored plainly, no archive comment, 64-bit fields or not. Everything
that is declared is checked against the item's length before it is used.
"""

import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from holdfast.errors import ChecksumError, IntegrityError, TruncatedFileError

# The header of a record, its entry in the directory, and the end of the directory.
LOCAL = struct.Struct("<4s5H3L2H")
CENTRAL = struct.Struct("<4s6H3L5H2L")
END = struct.Struct("<4s4H2LH")
_WIDE_LOCATOR = struct.Struct("<4sLQL")
_WIDE_END = struct.Struct("<4sQ2H2L4Q")
WIDE_END_NBYTES = _WIDE_END.size + _WIDE_LOCATOR.size
DATE = 0x0021  # the first day that the format can express
UNSET = 0xFFFFFFFF
_FLAG_ENCRYPTED = 0x0001
# The checksum and sizes of the record stand behind it.
FLAG_DESCRIPTOR = 0x0008

# What stands after the payload in an item of torch takes about 850 bytes, and what stands before it 700.
_WINDOW = 1280
# The archive of one tensor has 7 records at most.
_MOST_RECORDS = 64
_LONGEST_ENTRY = 1024
# The beginning, the end, and what was read last.
_MOST_WINDOWS = 4


def padding_field(unpadded: int, alignment: int) -> bytes:
    """The extra field of a record that fills ``unpadded`` bytes up to an aligned place."""
    nbytes = -unpadded % alignment
    if nbytes:
        nbytes += alignment if nbytes < 4 else 0  # a field is 4 bytes at least
    # "HF", in the range that the zip specification leaves to anyone.
    return struct.pack(f"<2sH{nbytes - 4}x", b"HF", nbytes - 4) if nbytes else b""


def end_of_directory(count: int, nbytes: int, begin: int, *, wide: bool) -> bytes:
    """The end of an archive, after a directory of so many records and bytes; ``wide`` with 64-bit fields."""
    end = b""
    if wide:
        end = _WIDE_END.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, nbytes, begin)
        end += _WIDE_LOCATOR.pack(b"PK\6\7", 0, begin + nbytes, 1)
        count, nbytes, begin = min(count, 0xFFFF), min(nbytes, UNSET), UNSET
    return end + END.pack(b"PK\5\6", 0, 0, count, count, nbytes, begin, 0)


class ArchiveRecord(NamedTuple):
    """What the directory says of one record; ``plain`` if it is neither compressed nor encrypted."""

    name: str
    plain: bool
    crc32: int
    nbytes: int
    header_at: int
    flags: int


class Archive:
    """The zip archive that fills an item.

    Args:
        read_at: Gives that many bytes from that offset in the item; fewer mean that the file ends there.
        nbytes: The item's length.
        path: Its file, for messages.
        key: Its key, for messages.
        most_records: An archive with more records is not looked into: it has none then. Nor is one with a
            directory of more than 1 KiB for each.

    Raises:
        IntegrityError: The directory is damaged or absent; also from every method.
    """

    __slots__ = ("_directory_at", "_nbytes", "_read_at", "_where", "_windows", "key", "path", "records")

    def __init__(
        self,
        read_at: Callable[[int, int], bytes],
        nbytes: int,
        *,
        path: str,
        key: str | None,
        most_records: int = _MOST_RECORDS,
    ) -> None:
        self._read_at, self._nbytes = read_at, nbytes
        self.path, self.key = path, key
        self._where = path if key is None else f"{path}, key {key!r}"
        self._windows: list[tuple[int, bytes]] = []
        self._directory_at = nbytes
        self.records = self._read_directory(most_records)

    def damaged(self, reason: str) -> NoReturn:
        """Raise IntegrityError: the item is damaged in this way."""
        raise IntegrityError(
            f"{self._where}: is not an archive that torch.save writes: {reason}. "
            "The file is damaged; restore it from a copy or load another checkpoint.",
            path=self.path,
            key=self.key,
        )

    def take(self, offset: int, nbytes: int) -> bytes:
        """Some bytes of the item. Those near its beginning, and those near its end, are read together."""
        for start, window in self._windows:
            if start <= offset and offset + nbytes <= start + len(window):
                return window[offset - start : offset - start + nbytes]
        if not 0 <= offset <= offset + nbytes <= self._nbytes:
            self.damaged(
                f"it has {self._nbytes} bytes, and bytes {offset} to {offset + nbytes} are asked for"
            )
        if self._nbytes <= 2 * _WINDOW:
            start, end = 0, self._nbytes
        elif offset >= self._nbytes - _WINDOW:
            start, end = self._nbytes - _WINDOW, self._nbytes
        else:
            start, end = offset, min(max(offset + nbytes, offset + _WINDOW), self._nbytes)
        window = self._read_at(start, end - start)
        if len(window) != end - start:
            raise TruncatedFileError(
                f"{self._where}: the file ends inside the item: {end - start} bytes should be at the item's "
                f"byte {start}, {len(window)} are there. Restore the file from a copy.",
                path=self.path,
                key=self.key,
                expected=end - start,
                found=len(window),
            )
        self._windows.append((start, window))
        del self._windows[:-_MOST_WINDOWS]
        return window[offset - start : offset - start + nbytes]

    def read_record(self, record: ArchiveRecord) -> bytes:
        """The content of a small, plain record, checked against its CRC-32 if it has one."""
        content = self.take(self.content_at(record), record.nbytes)
        found = zlib.crc32(content)
        # torch writes 0 for every record when told to compute no checksums.
        if record.crc32 not in (found, 0):
            raise ChecksumError(
                f"{self._where}: record {record.name} has CRC-32 {found:#010x}, "
                f"expected {record.crc32:#010x}. The file is damaged; restore it from a copy or load another "
                "checkpoint.",
                path=self.path,
                key=self.key,
                expected=record.crc32,
                found=found,
            )
        return content

    def content_at(self, record: ArchiveRecord) -> int:
        """Where the record's content begins in the item.

        The header before the content and what stands behind it must both agree with the directory, so
        that no single wrong byte can move the content.
        """
        header = self.take(record.header_at, LOCAL.size)
        signature, _, flags, _, _, _, *sizes, name_nbytes, extra_nbytes = LOCAL.unpack(header)
        name = record.name.encode()
        if (signature, flags, name_nbytes) != (b"PK\3\4", record.flags, len(name)) or name != self.take(
            record.header_at + LOCAL.size, len(name)
        ):
            self.damaged(f"the header of record {record.name} is not at byte {record.header_at}")
        start = record.header_at + LOCAL.size + len(name) + int(extra_nbytes)
        if start + record.nbytes > self._directory_at:
            self.damaged(f"record {record.name} of {record.nbytes} bytes reaches into the directory")
        if flags & FLAG_DESCRIPTOR:
            agrees = self._agrees_with_descriptor(record, start + record.nbytes)
        else:
            agrees = sizes == [record.crc32, record.nbytes, record.nbytes]
        if not agrees:
            self.damaged(f"checksum or size of record {record.name} differ between record and directory")
        return start

    def _agrees_with_descriptor(self, record: ArchiveRecord, at: int) -> bool:
        """Whether the checksum and sizes that stand behind the record, 32 or 64 bits wide, are right."""
        if not record.nbytes:
            return True  # torch leaves the descriptor of an empty record out
        wide = struct.pack("<4sLQQ", b"PK\7\x08", record.crc32, record.nbytes, record.nbytes)
        if at + len(wide) <= self._nbytes and self.take(at, len(wide)) == wide:
            return True
        if record.nbytes >= UNSET:
            return False
        narrow = struct.pack("<4s3L", b"PK\7\x08", record.crc32, record.nbytes, record.nbytes)
        return at + len(narrow) <= self._nbytes and self.take(at, len(narrow)) == narrow

    def _read_directory(self, most_records: int) -> dict[str, ArchiveRecord]:
        """The records by name, without the archive's folder; empty if there are too many."""
        if self._nbytes < END.size:
            self.damaged(f"it has only {self._nbytes} bytes")
        end_at = self._nbytes - END.size
        end = self.take(end_at, END.size)
        signature, _, _, _, count, nbytes, start, comment = END.unpack(end)
        if signature != b"PK\5\6" or comment:
            self.damaged("it does not end with the end of a directory")
        if end_at >= _WIDE_LOCATOR.size and self.take(end_at - 20, 4) == b"PK\6\7":
            _, _, wide_at, _ = _WIDE_LOCATOR.unpack(self.take(end_at - 20, 20))
            if wide_at != end_at - 20 - _WIDE_END.size:
                self.damaged("the end of the directory is not where it should be")
            signature, *_, count, nbytes, start = _WIDE_END.unpack(self.take(wide_at, _WIDE_END.size))
            end_at = wide_at
            if signature != b"PK\6\6":
                self.damaged("the end of the directory is not where it should be")
        if start + nbytes != end_at or not 0 < count <= nbytes // CENTRAL.size:
            self.damaged(f"a directory of {count} records in {nbytes} bytes cannot be at byte {start}")
        self._directory_at = start
        if count > most_records or nbytes > most_records * _LONGEST_ENTRY:
            return {}
        return self._parse_directory(self.take(start, nbytes), count)

    def _parse_directory(self, directory: bytes, count: int) -> dict[str, ArchiveRecord]:
        records: dict[str, ArchiveRecord] = {}
        at = 0
        prefix = ""
        for _ in range(count):
            if at + CENTRAL.size > len(directory):
                self.damaged("the directory ends too early")
            fields = CENTRAL.unpack_from(directory, at)
            signature, _, _, flags, method, _, _, crc32, stored, nbytes, *lengths, _, _, _, header_at = fields
            name_nbytes, extra_nbytes, comment_nbytes = lengths
            at += CENTRAL.size
            name = directory[at : at + name_nbytes].decode("ascii", "replace")
            extra = directory[at + name_nbytes : at + name_nbytes + extra_nbytes]
            at += name_nbytes + extra_nbytes + comment_nbytes
            nbytes, stored, header_at = self._widen(extra, nbytes, stored, header_at)
            plain = method == 0 and not flags & _FLAG_ENCRYPTED
            if signature != b"PK\1\2" or (plain and nbytes != stored) or header_at >= self._directory_at:
                self.damaged("an entry of the directory makes no sense")
            prefix = prefix or name.partition("/")[0] + "/"
            short = name.removeprefix(prefix)
            if short == name or short in records:
                self.damaged(f"record {name!r} is there twice, or outside of the archive's folder")
            records[short] = ArchiveRecord(name, plain, crc32, nbytes, header_at, flags)
        if at != len(directory):
            self.damaged("the directory is longer than its entries")
        return records

    def _widen(self, extra: bytes, *fields: int) -> list[int]:
        """Replace the fields that do not fit 32 bits by the 64-bit ones in the entry's extra part."""
        if UNSET not in fields:
            return list(fields)
        at = 0
        while at + 4 <= len(extra):
            kind, length = struct.unpack_from("<2H", extra, at)
            values = extra[at + 4 : at + 4 + length]
            if kind == 1:
                wide = iter(
                    [int.from_bytes(values[i : i + 8], "little") for i in range(0, len(values) - 7, 8)]
                )
                return [next(wide, field) if field == UNSET else field for field in fields]
            at += 4 + length
        return list(fields)
