"""The checksums of safetensors files, in a file of their own that nobody else looks at.

The format has no place for checksums. They are kept for each file under a digest of its header, in which
``IDENTITY`` stands for the content. So they are never taken for those of another file, whatever it is called:
one that was written anew has another header.
"""

import hashlib
from collections.abc import Mapping

import msgspec

from holdfast._format.manifest import CHECKSUM_ALGORITHM
from holdfast.errors import MetadataFormatError

IDENTITY = "holdfast"
"""The name in a header under which a digest of the file's checksums stands."""
IDENTITY_DIGITS = 32
LARGEST_CHECKSUMS = 4 << 30


class FileChecksums(msgspec.Struct, frozen=True):
    """The checksums of one file.

    Attributes:
        nbytes: The size of the file.
        checksums: The CRC-32 of each block of each tensor, in the order in which these lie; blocks are
            counted from the beginning of each tensor. Little-endian, 4 bytes each.
    """

    nbytes: int
    checksums: bytes


class _Content(msgspec.Struct):
    version: int
    algorithm: str
    block_size: int
    files: dict[str, FileChecksums]


def digest_of(data: bytes | bytearray) -> str:
    """A short digest, of a header or of checksums."""
    return hashlib.blake2b(data, digest_size=IDENTITY_DIGITS // 2).hexdigest()


def dump_checksums(files: Mapping[str, FileChecksums], block_size: int) -> bytes:
    """The content of the file of checksums: those of each file, by the digest of its header."""
    return msgspec.msgpack.encode(_Content(1, CHECKSUM_ALGORITHM, block_size, dict(files)))


def load_checksums(data: bytes | bytearray, block_size: int, *, path: str) -> dict[str, FileChecksums]:
    """What ``dump_checksums`` was given.

    Raises:
        MetadataFormatError: It is damaged, or of a kind that this version does not know.
    """
    try:
        content = msgspec.msgpack.decode(data, type=_Content)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MetadataFormatError(f"{path} does not hold checksums: {error}", path=path) from error
    if (content.version, content.algorithm, content.block_size) != (1, CHECKSUM_ALGORITHM, block_size):
        raise MetadataFormatError(f"{path} holds checksums of an unknown kind", path=path)
    return content.files
