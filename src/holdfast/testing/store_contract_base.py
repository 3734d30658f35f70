"""The store under test, and how the suite writes to it and reads from it."""

import random
import threading
from array import array
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from holdfast._format.item_table import Payload
from holdfast._io.blocks import BlockSums
from holdfast._io.file_access import FileReader
from holdfast._io.store import ByteStore

__all__ = ["MIB", "StoreContractBase", "pattern", "read_part"]

MIB = 1 << 20


class StoreContractBase:
    """The methods that the author of a store overrides; ``StoreContract`` describes them."""

    durable = True
    refuses_taken_names = True

    def make_store(self, tmp_path: Path) -> ByteStore:
        """A store for one test. Its folder need not exist; ``make`` is called on it."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[ByteStore]:
        """The store under test, made."""
        before = set(threading.enumerate())  # the threads of saves in the background of other tests
        store = self.make_store(tmp_path)
        store.make()
        yield store
        left = set(threading.enumerate()) - before
        names = [thread.name for thread in left if thread.name.startswith("holdfast")]
        assert names == [], "threads of ours outlived the calls that started them"

    def write(self, store: ByteStore, name: str, data: "bytes | bytearray") -> None:
        """Write one file."""
        with store.create(name, nbytes_hint=len(data), durable=self.durable) as file:
            file.write(data)

    def write_payload(self, store: ByteStore, data: bytes, offset: int, block_size: int) -> "array[int]":
        """Write the file "f" with ``data`` at ``offset`` and other bytes around it; return its checksums."""
        sums = BlockSums(block_size)
        with store.create("f", durable=self.durable) as file:
            file.write(b"\xff" * offset)
            file.write(data, sums)
            file.write(b"tail")
        return sums.finish()


@lru_cache(maxsize=16)
def pattern(nbytes: int, *, seed: int = 0) -> bytes:
    """Bytes in which no block is like another."""
    return random.Random(seed).randbytes(nbytes)  # noqa: S311 - chosen for being the same every time


def read_part(
    file: FileReader,
    buffer: "bytearray | memoryview",
    offset: int,
    nbytes: int,
    crcs: "array[int]",
    block_size: int,
    start: int,
) -> None:
    """Read and check one part of the payload at ``offset``."""
    file.read_blocks_into(buffer, Payload(offset, nbytes, crcs, block_size), start)
