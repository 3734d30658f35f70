"""Tests of the files that a store opens for reading."""

import pytest

from holdfast._io import pool
from holdfast._io.blocks import block_checksums
from holdfast._io.store import ByteStore
from holdfast.errors import ChecksumError, MetadataFormatError, TruncatedFileError
from holdfast.testing.store_contract_base import MIB, StoreContractBase, pattern, read_part

__all__ = ["StoreReadTests"]


class StoreReadTests(StoreContractBase):
    """A part of ``StoreContract``: any range is read, and is right or refused."""

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
                step = max(4 * MIB // block_size, 1) * block_size
                for a in [start, *range((start // block_size) * block_size + step, stop, step)]:
                    part = memoryview(got)[a - start : (a // block_size) * block_size + step - start]
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
                lambda a=a: read_part(file, memoryview(got)[a : a + 3 * MIB], 64, len(data), crcs, MIB, a)
                for a in range(0, len(data), 3 * MIB)
            ]
            pool.run(jobs, threads=4)
        assert got == data
