"""Reading together: what several ranks need is read from storage by one of them, and passed on.

Ranks that need the same lines carry out the same jobs in the same order, each on its own state. They differ
only in what a read does: one of them, in turns, reads and checks the bytes, and the others get them from it.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import Buffer

from holdfast._io.store import ByteStore, FileReader, FileWriter, byte_view
from holdfast._ranks.lane import Lane
from holdfast.errors import StorageError

__all__ = ["PassingStore"]

_HEADER = struct.Struct("<16sQQ")


class PassingStore(ByteStore):
    """A checkpoint as the members of a lane read it together. Each calls the same methods in the same order.

    Args:
        store: Where to read from.
        lane: The ranks that read.
        rank: This rank.
        first: The place in the lane of the member that reads first.
    """

    def __init__(self, store: ByteStore, lane: Lane, rank: int, first: int) -> None:
        self.url = store.url
        self.store = store
        self._lane = lane
        self._rank = rank
        self._turn = first

    def open(self, name: str) -> FileReader:
        """Open a file; only whose turn it is to read opens it in truth."""
        return _PassingReader(self, name)

    def pass_on(self, name: str, offset: int, view: memoryview, read: Callable[[], None]) -> None:
        """Fill ``view`` on all members; one of them by ``read``.

        Raises:
            StorageError: The members do not mean the same bytes.
        """
        source = self._lane.members[self._turn % len(self._lane.members)]
        self._turn += 1
        meant = _HEADER.pack(name.encode()[-16:], offset, len(view))
        header = bytearray(meant)
        if source == self._rank:
            read()
        self._lane.send_to_all(memoryview(header), source)
        if header != meant:
            raise StorageError(
                f"{self.url}: ranks that read together do not read the same: rank {source} read "
                f"{bytes(header)!r}, rank {self._rank} expected {meant!r}. Load with share_reads=False.",
                rank=source,
            )
        self._lane.send_to_all(view, source)

    def list(self) -> dict[str, int]:
        """The name and size of every file."""
        return self.store.list()

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return self.store.exists(name)

    def make(self) -> None:
        """Nothing is written here."""
        raise NotImplementedError

    def create(self, name: str, *, nbytes_hint: int | None = None, durable: bool = True) -> FileWriter:
        """Nothing is written here."""
        raise NotImplementedError

    def replace(self, name: str, *pieces: Buffer, durable: bool = True) -> None:
        """Nothing is written here."""
        raise NotImplementedError

    def delete(self, names: Any) -> None:
        """Nothing is written here."""
        raise NotImplementedError

    def sync(self) -> None:
        """Nothing is written here."""
        raise NotImplementedError


class _PassingReader(FileReader):
    def __init__(self, store: PassingStore, name: str) -> None:
        self.store = store
        self.name = name
        self.path = f"{store.url}/{name}"
        self._inner: FileReader | None = None

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """How long the file is."""
        return self._open().nbytes

    def _open(self) -> FileReader:
        if self._inner is None:
            self._inner = self.store.store.open(self.name)
        return self._inner

    def read_into(self, offset: int, buffer: Buffer) -> None:
        view = byte_view(buffer)
        self.store.pass_on(self.name, offset, view, lambda: self._open().read_into(offset, view))

    def read_blocks_into(
        self,
        buffer: Buffer,
        *,
        payload_offset: int,
        payload_nbytes: int,
        crcs: Sequence[int],
        block_size: int = 1 << 20,
        start: int = 0,
    ) -> None:
        view = byte_view(buffer)

        def read() -> None:
            self._open().read_blocks_into(
                view,
                payload_offset=payload_offset,
                payload_nbytes=payload_nbytes,
                crcs=crcs,
                block_size=block_size,
                start=start,
            )

        self.store.pass_on(self.name, payload_offset + start, view, read)

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
            self._inner = None
