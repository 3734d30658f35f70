"""The memory that files are read and written through, between two uses."""

import re
import sys
from pathlib import Path

import pytest

from holdfast._io.local_buffers import BUFFER_NBYTES, borrow, give_back


def test_buffers_of_an_upload_are_kept_for_the_next_one() -> None:
    first = [borrow() for _ in range(12)]
    for buffer in first:
        give_back(buffer)
    assert {id(borrow()) for _ in range(12)} == {id(buffer) for buffer in first}
    for buffer in first:
        give_back(buffer)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_the_system_may_take_the_memory_of_idle_buffers() -> None:
    buffer = borrow()
    buffer.write(b"1" * BUFFER_NBYTES)
    before = _lazily_free_nbytes()
    give_back(buffer)
    assert _lazily_free_nbytes() >= before + BUFFER_NBYTES


def _lazily_free_nbytes() -> int:
    found = re.search(r"LazyFree: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found
    return int(found[1]) << 10
