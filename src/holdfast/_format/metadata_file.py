"""The file ``.metadata``: a pickle for torch, the manifest, and a footer that ties them, in this order.

One file, so that one atomic replace commits a checkpoint. torch's reader stops at the end of the pickle and
never sees the rest; ours reads footer and manifest and never the pickle. Written by torch, the file has no
footer.
"""

import struct
import zlib
from dataclasses import dataclass

from holdfast.errors import MetadataFormatError, NewerFormatError

LARGEST_METADATA = 16 << 30
"""The most bytes of such a file that are read."""
MAGIC = b"HOLDFAST"
MARK = "holdfast"
"""Stands in the modules that our pickle for torch lists, so that a file that lost its footer is not taken for
torch's own.
"""
# pickle length, manifest length, CRC-32 of the pickle, CRC-32 of the manifest, layout version, then the
# CRC-32 of all footer bytes before it, and the magic at the very end.
_FIELDS = struct.Struct("<QQIIII")
_FOOTER = struct.Struct("<QQIIIII8s")
FOOTER_NBYTES = _FOOTER.size
LAYOUT = 1


@dataclass(frozen=True)
class Sections:
    """What a ``.metadata`` file holds.

    Attributes:
        pickle: What torch reads; empty if the checkpoint was saved for Holdfast alone.
        manifest: What Holdfast reads; None if torch wrote the file.
    """

    pickle: memoryview
    manifest: memoryview | None


def join(pickle: bytes, manifest: bytes) -> list[bytes]:
    """The pieces of the file, in order."""
    facts = (len(pickle), len(manifest), zlib.crc32(pickle), zlib.crc32(manifest), LAYOUT, 0)
    footer = _FOOTER.pack(*facts, zlib.crc32(_FIELDS.pack(*facts)), MAGIC)
    return [pickle, manifest, footer]


def split(data: bytes | bytearray, *, path: str) -> Sections:
    """Take a file apart and check it.

    Raises:
        MetadataFormatError: The file is empty, damaged or cut off, or of a newer layout.
    """
    view = memoryview(data)
    if not data:
        raise MetadataFormatError(
            f"{path} is empty: it was cut off. Restore the file, or load another checkpoint.", path=path
        )
    if len(data) < _FOOTER.size or not data.endswith(MAGIC):
        # A file whose footer was cut off has a pickle that does not reach to its end, or none.
        if MAGIC in data[-4 * _FOOTER.size :]:
            raise _damaged(path, "bytes follow its footer")
        return Sections(view, None)
    lengths_and_sums = _FOOTER.unpack(view[-_FOOTER.size :])
    pickle_nbytes, manifest_nbytes, pickle_crc, manifest_crc, layout, _, footer_crc, _ = lengths_and_sums
    if zlib.crc32(_FIELDS.pack(*lengths_and_sums[:6])) != footer_crc:
        raise _damaged(path, "its footer does not match its checksum")
    if layout > LAYOUT:
        raise NewerFormatError(
            f"{path} has layout {layout}; this version of holdfast reads up to {LAYOUT}. Update holdfast.",
            path=path,
            expected=LAYOUT,
            found=layout,
        )
    if pickle_nbytes + manifest_nbytes + _FOOTER.size != len(data):
        raise _damaged(
            path, f"it has {len(data)} bytes, expected {pickle_nbytes + manifest_nbytes + _FOOTER.size}"
        )
    pickle = view[:pickle_nbytes]
    manifest = view[pickle_nbytes : pickle_nbytes + manifest_nbytes]
    if zlib.crc32(pickle) != pickle_crc or zlib.crc32(manifest) != manifest_crc:
        raise _damaged(path, "its content does not match its checksum")
    return Sections(pickle, manifest)


def _damaged(path: str, problem: str) -> MetadataFormatError:
    return MetadataFormatError(
        f"{path} is damaged: {problem}. Restore the file, or load another checkpoint.", path=path
    )
