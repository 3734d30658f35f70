"""Checksums of blocks from sums of ranges, in any order and by any number of processes."""

import itertools
import random

import pytest

from holdfast._io.blocks import block_checksums
from holdfast._io.range_sums import RangeSums, join_sums


@pytest.mark.parametrize("nbytes", [0, 1, 15, 16, 17, 100, 4096])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_sums_of_ranges_make_the_checksums_of_blocks(nbytes: int, processes: int) -> None:
    chance = random.Random(nbytes * 7 + processes)
    data = memoryview(chance.randbytes(nbytes))
    cuts = sorted({0, nbytes, *(chance.randrange(nbytes + 1) for _ in range(9))})
    ranges = list(itertools.pairwise(cuts))
    chance.shuffle(ranges)
    parts = []
    for process in range(processes):
        mine = ranges[process::processes]
        if mine:
            sums = RangeSums(nbytes, min(a for a, _ in mine), max(b for _, b in mine) - 1, block_size=16)
            for begin, end in mine:
                sums.add(begin, data[begin:end])
            parts.append((sums.first_block, sums.sums.tobytes()))
    assert join_sums(nbytes, parts, block_size=16) == block_checksums(data, 16).tobytes()
