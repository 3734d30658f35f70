"""Tests of the files that a store writes."""

import random
import zlib
from array import array

import pytest

from holdfast._io import pool
from holdfast._io.blocks import BlockSums
from holdfast._io.progress import STRIDE, ProgressTracker
from holdfast._io.store import ByteStore
from holdfast.errors import StorageError, UsageError
from holdfast.testing.store_contract_base import MIB, StoreContractBase, pattern

__all__ = ["StoreWriteTests"]

SIZES = [0, 1, 4095, 4096, 4097, MIB - 1, MIB + 1, 8 * MIB - 1, 8 * MIB, 8 * MIB + 4097, 37 * MIB + 5]


class StoreWriteTests(StoreContractBase):
    """A part of ``StoreContract``: what was given is there, or nothing is."""

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
            with pytest.raises(BufferError, match="contiguous"):
                file.write(memoryview(b"abcd")[::2])
        assert store.read("f", max_bytes=10_000) == b"abc" + numbers.tobytes()

    @pytest.mark.parametrize("block_size", [1000, MIB, 3 * MIB])
    def test_block_checksums_are_those_of_zlib(self, store: ByteStore, block_size: int) -> None:
        """The sums are the CRC-32 of each block, counted from where the payload begins."""
        data, sums, none = pattern(10 * MIB + 77), BlockSums(block_size), BlockSums(block_size)
        with store.create("f", durable=self.durable) as file:
            file.write(b"head")
            file.write(data, sums)
            file.write(b"", none)
        expected = [zlib.crc32(data[at : at + block_size]) for at in range(0, len(data), block_size)]
        assert (list(sums.finish()), list(none.finish())) == (expected, [])
        assert store.read("f", max_bytes=len(data) + 4) == b"head" + data

    def test_a_file_is_created_only_once(self, store: ByteStore) -> None:
        """A name that is taken is refused, and what is there stays as it was."""
        if not self.refuses_taken_names:
            pytest.skip("this store declares that it does not notice taken names")
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

    def test_progress_is_told_of_all_bytes_in_steps(self, store: ByteStore) -> None:
        """Progress adds up to the bytes of the file, and no step is larger than ``STRIDE``."""
        told = _Told(stop_at=1 << 60)
        with store.create("a", durable=self.durable) as file:
            file.progress = told
            for nbytes in (5, 20 * MIB, 3):
                file.write(bytes(nbytes))
        assert sum(told.steps) == 20 * MIB + 8
        assert max(told.steps) <= STRIDE

    def test_progress_can_stop_a_large_write_in_its_middle(self, store: ByteStore) -> None:
        """The exception of the tracker leaves ``write``, or ``finish`` if bytes are confirmed so late."""
        told = _Told(stop_at=12 * MIB)
        file = store.create("a", durable=self.durable)
        file.progress = told
        with pytest.raises(InterruptedError):  # noqa: PT012 - either may be the one
            file.write(bytes(64 * MIB))
            file.finish()
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


class _Told(ProgressTracker):
    """Notes the steps, and raises after ``stop_at`` bytes."""

    def __init__(self, stop_at: int) -> None:
        super().__init__()
        self.steps: list[int] = []
        self._stop_at = stop_at

    def advance(self, nbytes: int) -> None:
        self.steps.append(nbytes)
        if sum(self.steps) >= self._stop_at:
            raise InterruptedError("enough")
