"""What one rank reads for others: each checks the bytes that it got, and that all mean the same bytes."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast._format.item_table import Payload
from holdfast._io.blocks import BLOCK_SIZE, crc32
from holdfast._io.file_access import FileReader
from holdfast._io.local import LocalStore
from holdfast._ranks.broadcast import Broadcast
from holdfast._storage.broadcast_source import BroadcastSource
from holdfast.errors import ChecksumError, StorageError

CONTENT = bytes(range(256)) * (3 * BLOCK_SIZE // 256) + b"the end"
CRCS = [crc32(CONTENT[at : at + BLOCK_SIZE]) for at in range(0, len(CONTENT), BLOCK_SIZE)]


class Lying(FileReader):
    """Reads other bytes than are there, and claims that they were checked: a rank with bad memory."""

    def __init__(self, inner: FileReader) -> None:
        self.path, self.nbytes = inner.path, inner.nbytes
        self._inner = inner

    def read_into(self, offset: int, buffer: Any) -> None:
        self._inner.read_into(offset, buffer)
        memoryview(buffer)[0] ^= 1

    def read_whole_blocks(self, offset: int, view: memoryview, crcs: Any, block_size: int) -> None:
        self.read_into(offset, view)

    def close(self) -> None:
        self._inner.close()


class LyingStore(LocalStore):
    def open(self, name: str) -> Any:
        return Lying(super().open(name))


class Damaging:
    """The connections between two ranks, which change a byte of everything longer than a header."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast
        self.members = broadcast.members

    def send_to_all(self, buffer: memoryview, source: int) -> None:
        self._broadcast.send_to_all(buffer, source)
        if len(buffer) > 100:
            buffer[-1] ^= 1


def both(folder: Path, work: Callable[[BroadcastSource], Any], **kinds: Any) -> list[Any]:
    """What each of two ranks, threads of this process, returns or raises; rank 0 reads first."""
    (folder / "a").write_bytes(CONTENT)
    (folder / "b").write_bytes(CONTENT)
    forth, back = socket.socketpair(), socket.socketpair()
    stores = [kinds.get("first", LocalStore)(folder), LocalStore(folder)]
    broadcasts = [
        Broadcast((0, 1), 0, back[0], forth[0], lambda: None),
        Broadcast((0, 1), 1, forth[1], back[1], lambda: None),
    ]
    outcomes: list[Any] = [None, None]

    def run(rank: int) -> None:
        broadcast: Any = (
            kinds.get("broadcast", lambda broadcast: broadcast)(broadcasts[rank])
            if rank == 1
            else broadcasts[rank]
        )
        try:
            outcomes[rank] = work(BroadcastSource(stores[rank], broadcast, rank, 0, {}))
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for broadcast in broadcasts:
        broadcast.close()
    return outcomes


def read_checked(source: BroadcastSource, start: int = 0, nbytes: int = len(CONTENT)) -> bytes:
    found = bytearray(nbytes)
    with source.open("a") as file:
        file.read_blocks_into(found, Payload(0, len(CONTENT), CRCS), start)
    return bytes(found)


def read_unchecked(source: BroadcastSource) -> bytes:
    found = bytearray(len(CONTENT))
    with source.open("a") as file:
        file.read_into(0, found)
    return bytes(found)


@pytest.mark.parametrize(("start", "stop"), [(0, len(CONTENT)), (5, len(CONTENT) - 9), (7, 19)])
def test_both_ranks_get_the_bytes(tmp_path: Path, start: int, stop: int) -> None:
    outcomes = both(tmp_path, lambda source: read_checked(source, start, stop - start))
    assert outcomes == [CONTENT[start:stop]] * 2


def test_a_rank_checks_what_another_read_for_it(tmp_path: Path) -> None:
    _, received = both(tmp_path, read_checked, first=LyingStore)
    assert isinstance(received, ChecksumError)
    assert str(tmp_path / "a") in str(received)


@pytest.mark.parametrize("read", [read_checked, read_unchecked])
def test_bytes_that_change_on_their_way_are_noticed(tmp_path: Path, read: Any) -> None:
    _, received = both(tmp_path, read, broadcast=Damaging)
    assert isinstance(received, ChecksumError)


def test_ranks_that_mean_other_bytes_raise(tmp_path: Path) -> None:
    """Files of one save have names of the same length and end: the whole name must be compared."""
    turns = iter(["a", "b"])
    lock = threading.Lock()

    def read(source: BroadcastSource) -> Any:
        with lock:
            name = next(turns)
        found = bytearray(100)
        with source.open(name) as file:
            file.read_into(0, found)
        return bytes(found)

    outcomes = both(tmp_path, read)
    failures = [outcome for outcome in outcomes if isinstance(outcome, StorageError)]
    assert len(failures) == 1
    assert "share_reads=False" in str(failures[0])
