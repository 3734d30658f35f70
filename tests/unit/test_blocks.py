"""Checksums of blocks: the same as zlib's, however the bytes are cut and whichever library computes them."""

import platform
import subprocess
import sys
import zlib
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._io import blocks
from holdfast._io.blocks import (
    BlockChecker,
    BlockSums,
    block_checksums,
    block_count,
    combine_blocks,
    crc32,
    crc32_combine,
)
from holdfast.errors import ChecksumError, MetadataFormatError, UsageError


@pytest.fixture(params=["isal", "pure Python"])
def combiner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pure Python":
        monkeypatch.setattr(blocks, "_fast_combine", None)
    elif platform.machine() not in ("x86_64", "AMD64", "aarch64", "arm64"):
        pytest.skip("isal has no wheel for this processor")
    else:
        assert blocks._fast_combine is not None, "isal is not installed: pip install isal"


def test_crc32_is_zlibs_and_can_be_continued() -> None:
    assert crc32(b"123456789") == 0xCBF43926
    assert crc32(b"6789", crc32(b"12345")) == 0xCBF43926
    assert crc32(b"") == 0


@pytest.mark.usefixtures("combiner")
@pytest.mark.parametrize("len2", [0, 1, 2, 255, 4096, 65537, 1 << 20])
def test_two_checksums_combine_into_that_of_both_pieces(len2: int) -> None:
    first, second = b"holdfast" * 99, bytes(range(256)) * (len2 // 256) + bytes(len2 % 256)
    assert crc32_combine(zlib.crc32(first), zlib.crc32(second), len2) == zlib.crc32(first + second)
    assert crc32_combine(0, zlib.crc32(second), len2) == zlib.crc32(second)


@given(st.binary(max_size=300), st.integers(1, 50))
def test_blocks_combine_into_the_whole_payload(data: bytes, block_size: int) -> None:
    crcs = block_checksums(data, block_size)
    assert list(crcs) == [zlib.crc32(data[at : at + block_size]) for at in range(0, len(data), block_size)]
    assert combine_blocks(crcs, len(data), block_size) == zlib.crc32(data)


@pytest.mark.usefixtures("combiner")
def test_thousands_of_blocks_combine() -> None:
    zeros = zlib.crc32(bytes(1 << 20))
    expected = 0
    for _ in range(2048):
        expected = zlib.crc32(bytes(1 << 10), expected)
    crcs = array("I", [zlib.crc32(bytes(1 << 10))] * 2048)
    assert combine_blocks(crcs, 2048 << 10, 1 << 10) == expected
    # 2 GiB of zeros in blocks of 1 MiB, against the same in blocks of 512 MiB.
    half = combine_blocks([zeros] * 512, 512 << 20)
    assert combine_blocks([zeros] * 2048, 2 << 30) == combine_blocks([half] * 4, 2 << 30, 512 << 20)


@given(st.lists(st.binary(max_size=40), max_size=12), st.integers(1, 33))
def test_how_the_bytes_arrive_does_not_matter(pieces: list[bytes], block_size: int) -> None:
    sums = BlockSums(block_size)
    for piece in pieces:
        sums.update(memoryview(piece))
    assert sums.finish() == block_checksums(b"".join(pieces), block_size)


def test_blocks_larger_than_a_step_are_one_checksum_each() -> None:
    data = bytes(range(256)) * (5 << 12)
    assert list(block_checksums(data, 3 << 20)) == [zlib.crc32(data[: 3 << 20]), zlib.crc32(data[3 << 20 :])]


def test_a_wrong_number_of_checksums_is_damaged_metadata() -> None:
    with pytest.raises(MetadataFormatError) as caught:
        combine_blocks([1, 2], 3 << 20)
    assert (caught.value.expected, caught.value.found) == (3, 2)
    with pytest.raises(MetadataFormatError):
        combine_blocks([1], 0)


def test_a_block_has_at_least_one_byte() -> None:
    assert [block_count(n, 10) for n in (0, 1, 10, 11)] == [0, 1, 1, 2]
    with pytest.raises(UsageError):
        block_checksums(b"x", 0)


def test_the_checker_names_the_first_block_that_differs() -> None:
    data = bytearray(b"a" * 10 + b"b" * 10 + b"c" * 5)
    crcs = block_checksums(data, 10)
    BlockChecker(crcs, 10, path="f", offset=100).update(memoryview(data))
    data[12] ^= 4
    data[22] ^= 4
    with pytest.raises(ChecksumError, match=r"f: the bytes 110 to 120") as caught:
        BlockChecker(crcs, 10, path="f", offset=100).update(memoryview(data))
    assert (caught.value.path, caught.value.expected) == ("f", crcs[1])


def test_the_checker_looks_at_the_short_last_block_when_it_ends() -> None:
    checker = BlockChecker(block_checksums(b"0123456789abc", 10), 10, path="f", offset=0)
    checker.update(memoryview(b"0123456789abX"))
    with pytest.raises(ChecksumError, match="bytes 10 to 13"):
        checker.finish()


def test_without_isal_the_results_are_the_same() -> None:
    program = (
        "import sys, zlib; sys.modules['isal'] = None\n"
        "from holdfast._io import blocks\n"
        "assert blocks.crc32 is zlib.crc32\n"
        "data = bytes(range(256)) * 9999\n"
        "assert blocks.combine_blocks(blocks.block_checksums(data), len(data)) == zlib.crc32(data)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
