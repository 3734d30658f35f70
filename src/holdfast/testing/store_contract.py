"""Owns the suite that every ByteStore passes; authors of a store subclass it in their own tests."""

import random
import threading
import zlib
from array import array
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from holdfast._io import pool
from holdfast._io.blocks import block_checksums, split_ranges
from holdfast._io.oversight import STRIDE, Oversight
from holdfast._io.store import ByteStore, FileReader
from holdfast.errors import (
    CheckpointNotFoundError,
    ChecksumError,
    MetadataFormatError,
    StorageError,
    TruncatedFileError,
    UnsafeMetadataError,
    UsageError,
)

__all__ = ["StoreContract"]

MIB = 1 << 20
BAD_NAMES = ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "a\0b"]
SIZES = [0, 1, 4095, 4096, 4097, MIB - 1, MIB + 1, 8 * MIB - 1, 8 * MIB, 8 * MIB + 4097, 37 * MIB + 5]


class StoreContract:
    """What a ByteStore promises. A subclass, named Test..., has ``make_store``.

    Attributes:
        durable: What ``create`` and ``replace`` are called with.
    """

    durable = True

    def make_store(self, tmp_path: Path) -> ByteStore:
        """A store for one test. Its folder need not exist; ``make`` is called on it."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[ByteStore]:
        """The store under test, made."""
        store = self.make_store(tmp_path)
        store.make()
        yield store
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast")]
        assert names == [], "threads of ours outlived the calls that started them"

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_names_that_leave_the_folder_are_refused(self, store: ByteStore, name: str) -> None:
        """Every method checks the names it gets; those from metadata count as unsafe."""
        for call in (
            store.create,
            store.exists,
            lambda n: store.replace(n, b""),
            lambda n: store.delete([n]),
        ):
            with pytest.raises(UsageError):
                call(name)
        for read in (store.open, lambda n: store.read(n, max_bytes=1)):
            with pytest.raises(UnsafeMetadataError):
                read(name)

    def test_make_may_be_called_again(self, store: ByteStore) -> None:
        """Every rank calls make, in any order, and no file is lost by it."""
        self.write(store, "kept", b"x")
        store.make()
        assert store.read("kept", max_bytes=1) == b"x"

    @pytest.mark.parametrize("nbytes", SIZES)
    @pytest.mark.parametrize("hinted", [True, False])
    def test_what_is_written_is_read(self, store: ByteStore, nbytes: int, hinted: bool) -> None:
        """A file of any size comes back as it was, whether its size was announced or not."""
        data = pattern(nbytes)
        hint = nbytes if hinted else None
        with store.create("f", nbytes_hint=hint, durable=self.durable) as file:
            file.write(data)
            assert file.position == nbytes
            assert file.finish() == nbytes
        store.sync()
        assert store.list() == {"f": nbytes}
        assert store.read("f", max_bytes=nbytes) == data

    def test_a_wrong_size_hint_changes_nothing(self, store: ByteStore) -> None:
        """The hint is about speed: a file much larger or smaller than announced is still right."""
        data = pattern(20 * MIB + 3)
        for name, hint in (("grown", 10), ("shrunk", 1 << 40)):
            with store.create(name, nbytes_hint=hint, durable=self.durable) as file:
                file.write(data)
            assert store.read(name, max_bytes=len(data)) == data

    def test_pieces_of_any_size_add_up(self, store: ByteStore) -> None:
        """How the caller cuts the bytes makes no difference, nor does reusing its buffer at once."""
        rng = random.Random(5)  # noqa: S311 - chosen for being the same every time
        whole = bytearray()
        with store.create("f", durable=self.durable) as file:
            while len(whole) < 18 * MIB:
                piece = bytearray(rng.randbytes(rng.choice([0, 1, 7, 4096, 65536, 100_000, 3 * MIB + 1])))
                whole += piece
                file.write(piece)
                piece[:] = bytes(len(piece))
                assert file.position == len(whole)
        assert store.read("f", max_bytes=len(whole)) == whole

    def test_any_contiguous_buffer_is_taken(self, store: ByteStore) -> None:
        """Items may have any size. A buffer with gaps is refused, and the file can still be written."""
        numbers = array("d", range(1000))
        with store.create("f", durable=self.durable) as file:
            for data in (b"a", bytearray(b"b"), memoryview(b"cc")[1:], numbers):
                file.write(data)
            with pytest.raises(TypeError):
                file.write(memoryview(b"abcd")[::2])
        assert store.read("f", max_bytes=10_000) == b"abc" + numbers.tobytes()

    @pytest.mark.parametrize("block_size", [1000, MIB, 3 * MIB])
    def test_block_checksums_are_those_of_zlib(self, store: ByteStore, block_size: int) -> None:
        """write_blocks returns the CRC-32 of each block, counted from where the payload begins."""
        data = pattern(10 * MIB + 77)
        with store.create("f", durable=self.durable) as file:
            file.write(b"head")
            crcs = file.write_blocks(data, block_size)
            assert file.write_blocks(b"", block_size) == array("I")
        expected = [zlib.crc32(data[at : at + block_size]) for at in range(0, len(data), block_size)]
        assert list(crcs) == expected
        assert store.read("f", max_bytes=len(data) + 4) == b"head" + data

    def test_padding_is_zeros_up_to_the_alignment(self, store: ByteStore) -> None:
        """pad_to appends nothing where the position is a multiple already."""
        with store.create("f", durable=self.durable) as file:
            file.write(b"x")
            for alignment, position in ((64, 64), (64, 64), (4096, 4096), (1, 4096)):
                file.pad_to(alignment)
                assert file.position == position
            file.write(b"y")
        assert store.read("f", max_bytes=5000) == b"x" + bytes(4095) + b"y"

    def test_a_file_is_created_only_once(self, store: ByteStore) -> None:
        """A name that is taken is refused, and what is there stays as it was."""
        self.write(store, "f", b"old")
        with pytest.raises(StorageError) as caught:
            store.create("f")
        assert caught.value.path is not None
        assert caught.value.path.endswith("f")
        assert store.read("f", max_bytes=3) == b"old"

    @pytest.mark.parametrize("nbytes", [0, 10, 20 * MIB])
    def test_abort_leaves_nothing(self, store: ByteStore, nbytes: int) -> None:
        """An aborted file is gone, its name is free again, and aborting twice is fine."""
        file = store.create("f", durable=self.durable)
        file.write(pattern(nbytes))
        file.abort()
        file.abort()
        assert store.list() == {}
        with pytest.raises(UsageError):
            file.write(b"x")
        self.write(store, "f", b"new")

    def test_an_exception_in_the_with_block_leaves_nothing(self, store: ByteStore) -> None:
        """The exception passes through, interrupts included, and the file is removed."""
        for kind in (RuntimeError, KeyboardInterrupt):
            with pytest.raises(kind), store.create("f", durable=self.durable) as file:  # noqa: PT012
                file.write(pattern(9 * MIB))
                raise kind
            assert not store.exists("f")

    def test_an_oversight_is_told_of_all_bytes_in_steps(self, store: ByteStore) -> None:
        """However they come, and whatever the size of a piece."""
        told = _Told(stop_at=1 << 60)
        with store.create("a", durable=self.durable) as file:
            file.oversight = told
            for nbytes in (5, 20 * MIB, 3):
                file.write(bytes(nbytes))
        assert sum(told.steps) == 20 * MIB + 8
        assert max(told.steps) <= STRIDE

    def test_an_oversight_stops_a_large_write_in_its_middle(self, store: ByteStore) -> None:
        """Its exception leaves the write, and the file is gone."""
        told = _Told(stop_at=12 * MIB)
        file = store.create("a", durable=self.durable)
        file.oversight = told
        with pytest.raises(InterruptedError):
            file.write(bytes(64 * MIB))
        assert sum(told.steps) <= 12 * MIB + STRIDE
        assert store.list() == {}

    def test_a_finished_file_stays_and_is_closed(self, store: ByteStore) -> None:
        """After finish, abort does nothing and writing is an error."""
        file = store.create("f", durable=self.durable)
        file.write(b"abc")
        file.finish()
        file.abort()
        for call in (file.finish, lambda: file.write(b"x")):
            with pytest.raises(UsageError):
                call()
        assert store.read("f", max_bytes=3) == b"abc"

    def test_several_files_are_written_at_once(self, store: ByteStore) -> None:
        """Writers do not wait for each other, on one thread or on several."""
        contents = {f"f{n}": pattern(18 * MIB + n, seed=n) for n in range(3)}
        writers = {name: store.create(name, durable=self.durable) for name in contents}
        for at in range(0, 19 * MIB, 5 * MIB):
            for name, data in contents.items():
                writers[name].write(data[at : at + 5 * MIB])
        pool.run([file.finish for file in writers.values()], threads=3)
        for name, data in contents.items():
            assert store.read(name, max_bytes=len(data)) == data

    def test_replace_puts_the_whole_file_in_place(self, store: ByteStore) -> None:
        """It makes a new file or takes an old one's place, and leaves no other file behind."""
        for data in (b"first", b"", pattern(3 * MIB), b"last"):
            store.replace("f", data, durable=self.durable)
            assert store.read("f", max_bytes=3 * MIB) == data
            assert store.list() == {"f": len(data)}

    def test_a_reader_keeps_the_file_that_it_opened(self, store: ByteStore) -> None:
        """Whoever reads while a replace happens gets the old bytes or an error, never a mix."""
        store.replace("f", b"old" * 1000, durable=self.durable)
        with store.open("f") as file:
            store.replace("f", b"new" * 1000, durable=self.durable)
            data = bytearray(3000)
            try:
                file.read_into(0, data)
            except StorageError:
                return
        assert data == b"old" * 1000

    def test_ranges_are_read_exactly(self, store: ByteStore) -> None:
        """Any range up to the end can be read, empty ones too."""
        data = pattern(5 * MIB + 9)
        self.write(store, "f", data)
        with store.open("f") as file:
            assert file.nbytes == len(data)
            for start, stop in ((0, 0), (0, 1), (4095, 4098), (17, 3 * MIB), (MIB, 5 * MIB + 9), (9, 9)):
                got = bytearray(stop - start)
                file.read_into(start, got)
                assert got == data[start:stop]

    def test_reading_past_the_end_names_the_file_and_both_sizes(self, store: ByteStore) -> None:
        """A range that reaches beyond the file is a TruncatedFileError, whatever its size."""
        self.write(store, "f", b"abc")
        with store.open("f") as file:
            for offset, nbytes in ((0, 4), (3, 1), (100, 2 * MIB)):
                with pytest.raises(TruncatedFileError) as caught:
                    file.read_into(offset, bytearray(nbytes))
                assert (caught.value.expected, caught.value.found) == (offset + nbytes, 3)
                assert str(caught.value.path).endswith("f")
            with pytest.raises(MetadataFormatError):
                file.read_into(-1, bytearray(1))

    @pytest.mark.parametrize("offset", [0, 4096, 4096 + 64])
    @pytest.mark.parametrize("block_size", [4096, MIB, 5 * MIB])
    def test_any_part_of_a_payload_is_read_and_checked(
        self, store: ByteStore, offset: int, block_size: int
    ) -> None:
        """Ranges may begin and end inside of blocks; cut in pieces they give the same bytes."""
        data = pattern(11 * MIB + 123)
        crcs = self.write_payload(store, data, offset, block_size)
        size = len(data)
        ranges = [
            (0, size),
            (0, 1),
            (size - 1, size),
            (5, 5),
            (100, size - 100),
            (block_size, 2 * block_size),
        ]
        ranges += [(block_size - 1, block_size + 1), (MIB + 1, 9 * MIB), (9 * MIB, size)]
        with store.open("f") as file:
            for start, stop in ranges:
                got = bytearray(stop - start)
                for a, b in split_ranges(start, stop, nbytes=4 * MIB, block_size=block_size):
                    part = memoryview(got)[a - start : b - start]
                    read_part(file, part, offset, size, crcs, block_size, a)
                assert got == data[start:stop]

    @pytest.mark.parametrize("place", ["first", "middle", "last"])
    def test_a_changed_byte_is_found_wherever_its_block_is_read(self, store: ByteStore, place: str) -> None:
        """ChecksumError names the file and where the block begins; blocks not asked for do not matter."""
        data = pattern(6 * MIB + 50)
        at = {"first": 3, "middle": 3 * MIB + 77, "last": 6 * MIB + 49}[place]
        damaged = bytearray(data)
        damaged[at] ^= 1
        self.write(store, "f", bytes(64) + damaged)
        crcs, size = block_checksums(data, MIB), len(data)
        begin = at // MIB * MIB
        with store.open("f") as file:
            for start, stop in ((0, size), (begin, min(begin + MIB, size)), (at // 2 + begin // 2, at + 1)):
                with pytest.raises(ChecksumError) as caught:
                    read_part(file, bytearray(stop - start), 64, size, crcs, MIB, start)
                assert f" {64 + begin} " in str(caught.value)
                assert str(caught.value.path).endswith("f")
            other = bytearray(MIB)
            start = 0 if begin else MIB
            read_part(file, other, 64, size, crcs, MIB, start)
            assert other == data[start : start + MIB]

    def test_a_payload_that_does_not_fit_its_checksums_is_refused(self, store: ByteStore) -> None:
        """Sizes and counts come from metadata: they are checked before anything is read."""
        self.write(store, "f", bytes(3 * MIB))
        crcs = block_checksums(bytes(3 * MIB), MIB)
        with store.open("f") as file:
            for size, table, start in ((3 * MIB, crcs[:2], 0), (2 * MIB, crcs, 0), (3 * MIB, crcs, 3 * MIB)):
                with pytest.raises(MetadataFormatError):
                    read_part(file, bytearray(1), 0, size, table, MIB, start)
            with pytest.raises(TruncatedFileError):
                read_part(file, bytearray(MIB), 1, 3 * MIB, crcs, MIB, 2 * MIB)

    def test_threads_share_one_reader(self, store: ByteStore) -> None:
        """Positional reads of several threads do not disturb each other."""
        data = pattern(40 * MIB)
        crcs = self.write_payload(store, data, 64, MIB)
        got = bytearray(len(data))
        with store.open("f") as file:
            jobs = [
                lambda a=a, b=b: read_part(file, memoryview(got)[a:b], 64, len(data), crcs, MIB, a)
                for a, b in split_ranges(0, len(data), nbytes=3 * MIB)
            ]
            pool.run(jobs, threads=4)
        assert got == data

    def test_a_missing_file_is_named(self, store: ByteStore) -> None:
        """The error is CheckpointNotFoundError, which is a FileNotFoundError; exists is False."""
        for call in (lambda: store.open("gone"), lambda: store.read("gone", max_bytes=1)):
            with pytest.raises(CheckpointNotFoundError, match="gone") as caught:
                call()
            assert str(caught.value.path).endswith("gone")
        assert not store.exists("gone")

    def test_read_takes_no_memory_for_a_file_that_is_too_large(self, store: ByteStore) -> None:
        """The limit is inclusive, and a larger file is an error that names both sizes."""
        self.write(store, "f", b"abcd")
        assert store.read("f", max_bytes=4) == b"abcd"
        with pytest.raises(MetadataFormatError) as caught:
            store.read("f", max_bytes=3)
        assert (caught.value.expected, caught.value.found) == (3, 4)

    def test_listing_and_deleting(self, store: ByteStore) -> None:
        """Every file is listed with its size; delete removes some and does not mind missing ones."""
        for n in range(5):
            self.write(store, f"f{n}", bytes(n))
        assert store.list() == {f"f{n}": n for n in range(5)}
        store.delete(["f1", "never", "f3"])
        store.delete([])
        assert store.list() == {"f0": 0, "f2": 2, "f4": 4}
        assert [n for n in range(5) if store.exists(f"f{n}")] == [0, 2, 4]

    def test_a_store_that_was_never_made_is_empty(self, tmp_path: Path) -> None:
        """Looking at a place where nothing is raises nothing and makes nothing."""
        store = self.make_store(tmp_path / "nowhere")
        assert store.list() == {}
        assert not store.exists("f")
        store.delete(["f"])
        with pytest.raises(CheckpointNotFoundError):
            store.open("f")

    def write(self, store: ByteStore, name: str, data: "bytes | bytearray") -> None:
        """Write one file."""
        with store.create(name, nbytes_hint=len(data), durable=self.durable) as file:
            file.write(data)

    def write_payload(self, store: ByteStore, data: bytes, offset: int, block_size: int) -> "array[int]":
        """Write the file "f" with ``data`` at ``offset``, something else around it; returns its checksums."""
        with store.create("f", durable=self.durable) as file:
            file.write(b"\xff" * offset)
            crcs = file.write_blocks(data, block_size)
            file.write(b"tail")
        return crcs


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
    file.read_blocks_into(
        buffer, payload_offset=offset, payload_nbytes=nbytes, crcs=crcs, block_size=block_size, start=start
    )


class _Told(Oversight):
    """Notes the steps, and says that it is enough after so many bytes."""

    def __init__(self, stop_at: int) -> None:
        self.steps: list[int] = []
        self._stop_at = stop_at

    def wrote(self, nbytes: int) -> None:
        self.steps.append(nbytes)
        if sum(self.steps) >= self._stop_at:
            raise InterruptedError("enough")
