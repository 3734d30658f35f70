"""A checkpoint that several ranks read together: each range is read by one of them and passed on.

Ranks that need the same lines carry out the same jobs in the same order, each on its own state. They differ
only in what a read does: one of them, in turns, reads the bytes from storage, and the others get them from
it. Every rank checks the bytes that it got, as if it had read them itself.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence

from typing_extensions import Buffer

from holdfast._format.item_table import Payload
from holdfast._io.blocks import crc32
from holdfast._io.file_access import FileReader, check_payloads
from holdfast._io.store import FileSource
from holdfast._io.streams import byte_view
from holdfast._ranks.broadcast import Broadcast
from holdfast.errors import ChecksumError, StorageError

_HEADER = struct.Struct("<32sI")
"""What the bytes are, as a digest of file, offset and length; then their CRC-32, or 0."""


class BroadcastSource(FileSource):
    """A checkpoint as the members of a broadcast read it. Each member makes the same calls in the same order.

    Args:
        store: Where to read from.
        broadcast: The ranks that read.
        rank: This rank.
        first: The place in the broadcast of the member that reads first.
        sizes: What ``list`` returns: this rank has several of these for one load, and lists once.
    """

    reads_whole_rows = True

    def __init__(
        self, store: FileSource, broadcast: Broadcast, rank: int, first: int, sizes: dict[str, int]
    ) -> None:
        self.url = store.url
        self.traits = store.traits
        self.store = store
        self._broadcast = broadcast
        self._rank = rank
        self._turn = first
        self._sizes = sizes

    def open(self, name: str) -> FileReader:
        """Open a file. Only a member whose turn it is to read opens it on the storage."""
        return _BroadcastReader(self, name)

    def pass_on(self, name: str, offset: int, view: memoryview, read: Callable[[], int]) -> int | None:
        """Fill ``view`` on all members.

        Args:
            name: The file.
            offset: Where in it the bytes begin.
            view: Where to put them.
            read: Fills ``view`` from storage, and returns the CRC-32 of it, or 0. One member calls it.

        Returns:
            The CRC-32 that the member who read has sent; None on that member itself.

        Raises:
            StorageError: The members do not mean the same bytes.
        """
        source = self._broadcast.members[self._turn % len(self._broadcast.members)]
        self._turn += 1
        meant = hashlib.sha256(repr((name, offset, len(view))).encode()).digest()
        header = bytearray(_HEADER.size)
        if source == self._rank:
            _HEADER.pack_into(header, 0, meant, read())
        self._broadcast.send_to_all(memoryview(header), source)
        sent, checksum = _HEADER.unpack(header)
        if sent != meant:
            raise StorageError(
                f"{self.url}: ranks that read together do not read the same bytes: rank {self._rank} "
                f"expected {len(view)} bytes of {name} from {offset} on, and rank {source} sent others. "
                "Load with share_reads=False.",
                rank=source,
            )
        self._broadcast.send_to_all(view, source)
        return None if source == self._rank else int(checksum)

    def expect(self, nbytes: int) -> None:
        """Tell the storage."""
        self.store.expect(nbytes)

    def list(self) -> dict[str, int]:
        """The name and size of every file."""
        return self._sizes

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return self.store.exists(name)

    def read(self, name: str, *, max_bytes: int) -> bytearray:
        """The whole of a small file, for this rank alone."""
        return self.store.read(name, max_bytes=max_bytes)


class _BroadcastReader(FileReader):
    def __init__(self, source: BroadcastSource, name: str) -> None:
        self.name = name
        self.path = f"{source.url}/{name}"
        self._source = source
        self._inner: FileReader | None = None

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """How long the file is."""
        return self._open().nbytes

    def _open(self) -> FileReader:
        if self._inner is None:
            self._inner = self._source.store.open(self.name)
        return self._inner

    def read_into(self, offset: int, buffer: Buffer) -> None:
        """Fill ``buffer``; what came from another rank is what that rank read."""
        self.read_together(offset, byte_view(buffer), ())

    def read_whole_blocks(self, offset: int, view: memoryview, crcs: Sequence[int], block_size: int) -> None:
        """Fill ``view``, and check each block by the checkpoint's own checksums on every rank."""
        self.read_together(offset, view, [Payload(offset, len(view), crcs, block_size)])

    def read_together(self, offset: int, view: memoryview, payloads: Sequence[Payload]) -> None:
        """Fill ``view``; every rank checks the payloads or, if there are none, what the reading rank sent."""

        def read() -> int:
            self._open().read_together(offset, view, payloads)
            return 0 if payloads else crc32(view)

        sent = self._source.pass_on(self.name, offset, view, read)
        if sent is None:
            return
        check_payloads(payloads, offset, view, path=self.path)
        if not payloads and sent != crc32(view):
            raise ChecksumError(
                f"{self.path}: bytes {offset} to {offset + len(view)} were changed on their way from the "
                "rank that read them. Load again; if it happens again, a network device or memory is faulty.",
                path=self.path,
            )

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
            self._inner = None
