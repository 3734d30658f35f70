"""Ranges of files, gathered in buffers and written by another thread."""

import errno
import itertools
import random
from pathlib import Path

import pytest

from holdfast._io.file_access import RangeWriter
from holdfast._io.local import LocalStore
from holdfast._io.range_ring import RangeRing


@pytest.mark.parametrize("page_cache", ["auto", "keep", "bypass"])
def test_ranges_of_any_size_come_to_their_places(tmp_path: Path, page_cache: str) -> None:
    chance = random.Random(3)
    whole = chance.randbytes(22_000_123)
    cuts = sorted({0, len(whole), *(chance.randrange(len(whole)) for _ in range(40))})
    ranges = list(itertools.pairwise(cuts))
    store = LocalStore(tmp_path, page_cache=page_cache)  # type: ignore[arg-type]
    store.reserve("x", len(whole))
    seen: dict[int, bytes] = {}
    for half in (ranges[::2], ranges[1::2]):
        written: list[int] = []
        with store.open_ranges("x") as file, RangeRing(written.append) as ring:
            for begin, end in half:
                ring.put(
                    file, begin, memoryview(whole)[begin:end], lambda at, copy: seen.update({at: bytes(copy)})
                )
        assert sum(written) == sum(end - begin for begin, end in half)
    assert (tmp_path / "x").read_bytes() == whole
    assert b"".join(seen[at] for at in sorted(seen)) == whole


class _Full(RangeWriter):
    path = "x"

    def write_at(self, offset: int, view: memoryview) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def finish(self) -> None:
        """Not reached."""

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("nbytes", [10, 1 << 20, 60 << 20])
def test_a_range_that_cannot_be_written_raises(nbytes: int) -> None:
    with pytest.raises(OSError, match="No space left"), RangeRing(lambda _: None) as ring:
        ring.put(_Full(), 5, memoryview(bytearray(nbytes)), lambda _, __: None)
