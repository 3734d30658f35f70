"""Owns the zip archive of a torch.save file, written from front to back: headers, descriptors, directory.

Sizes of records are known before their content, checksums after it. So each record has its checksum behind
it, and the directory at the end has all of them. ``torch.load``, also with ``mmap=True``, and every reader of
zip archives take that.
"""

import struct
from typing import NamedTuple

from holdfast._format.torch_item_zip import (
    CENTRAL,
    DATE,
    FLAG_DESCRIPTOR,
    LOCAL,
    UNSET,
    end_of_directory,
    padding_field,
)

_ALIGNMENT = 64
"""What torch keeps for the content of records."""


class _Member(NamedTuple):
    name: bytes
    nbytes: int
    offset: int
    crc32: int


class ArchiveLayout:
    """The parts of an archive around the contents of its records, one record after the other.

    Call ``header``, write the content, call ``descriptor``; in the end ``directory``. All that they return is
    written, in this order.
    """

    def __init__(self) -> None:
        self._entries: list[_Member] = []
        self._position = 0
        self._open: tuple[bytes, int, int] | None = None

    def header(self, name: str, nbytes: int) -> bytes:
        """What stands before the content of a record, which begins at an aligned place."""
        offset, encoded = self._position, name.encode()
        is_wide = nbytes >= UNSET
        extra = struct.pack("<2H2Q", 1, 16, 0, 0) if is_wide else b""
        unpadded = offset + LOCAL.size + len(encoded) + len(extra)
        extra += padding_field(unpadded, _ALIGNMENT)
        sizes = (UNSET, UNSET) if is_wide else (0, 0)
        facts = (FLAG_DESCRIPTOR, 0, 0, DATE, 0, *sizes, len(encoded), len(extra))
        header = LOCAL.pack(b"PK\3\4", 45 if is_wide else 20, *facts) + encoded + extra
        self._open = encoded, nbytes, offset
        self._position += len(header) + nbytes
        return header

    def descriptor(self, crc32: int) -> bytes:
        """What stands behind the content of the record that was begun last."""
        assert self._open is not None
        name, nbytes, offset = self._open
        self._entries.append(_Member(name, nbytes, offset, crc32))
        self._open = None
        form = "<4sL2Q" if nbytes >= UNSET else "<4s3L"
        descriptor = struct.pack(form, b"PK\7\x08", crc32, nbytes, nbytes)
        self._position += len(descriptor)
        return descriptor

    def directory(self) -> bytes:
        """The end of the archive."""
        entries = b"".join(map(_central, self._entries))
        count, at = len(self._entries), self._position
        wide = count >= 0xFFFF or at + len(entries) >= UNSET
        return entries + end_of_directory(count, len(entries), at, wide=wide)


def _central(entry: _Member) -> bytes:
    """The entry of a record in the directory; numbers that need 64 bits stand in its extra part."""
    numbers = (entry.nbytes, entry.nbytes, entry.offset)
    wide = [number for number in numbers if number >= UNSET]
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    stored, nbytes, offset = (min(number, UNSET) for number in numbers)
    version = 45 if wide else 20
    facts = (FLAG_DESCRIPTOR, 0, 0, DATE, entry.crc32, stored, nbytes, len(entry.name), len(extra))
    return CENTRAL.pack(b"PK\1\2", 45, version, *facts, 0, 0, 0, 0, offset) + entry.name + extra
