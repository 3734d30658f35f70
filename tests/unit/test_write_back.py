"""What the files of a save leave in the page cache, and what ``auto`` makes of disks of several speeds."""

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.cached import cached_share

import holdfast
from holdfast._io import write_back
from holdfast._io.page_cache import PageCache
from holdfast._io.write_back import BufferOutput
from holdfast.errors import UsageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is in the page cache")

MIB = 1 << 20
BUFFER = 8 * MIB
STRETCH = 64 * MIB // BUFFER


def kept_of(folder: Path) -> float:
    """How much of the one large file of a checkpoint is in the page cache."""
    return cached_share(max(folder.iterdir(), key=lambda path: path.stat().st_size))


def state() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6 * MIB, dtype=torch.float32), "b": torch.ones(3 * MIB)}


@pytest.mark.parametrize(("choice", "share"), [("keep", 1.0), ("bypass", 0.0)])
def test_keep_leaves_the_checkpoint_in_the_page_cache_and_bypass_does_not(
    tmp_path: Path, choice: PageCache, share: float
) -> None:
    holdfast.save(state(), checkpoint_id=tmp_path, page_cache=choice)
    assert kept_of(tmp_path) == pytest.approx(share, abs=0.01)
    loaded = {key: torch.zeros_like(value) for key, value in state().items()}
    holdfast.load(loaded, checkpoint_id=tmp_path)
    assert all(torch.equal(loaded[key], value) for key, value in state().items())


def test_a_background_save_follows_the_same_choice(tmp_path: Path) -> None:
    saving: Any = holdfast.async_save(state(), checkpoint_id=tmp_path, page_cache="keep")
    saving.result()
    assert kept_of(tmp_path) == 1.0


def test_bypass_leaves_nothing_where_the_file_system_refuses_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_back, "set_direct", lambda *_: False)
    holdfast.save(state(), checkpoint_id=tmp_path, page_cache="bypass")
    assert kept_of(tmp_path) < 0.01


def test_another_word_is_refused_with_the_choices(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'auto', 'keep', 'bypass', not 'always'"):
        holdfast.save(state(), checkpoint_id=tmp_path, page_cache="always")  # type: ignore[arg-type]
    writer = holdfast.FileSystemWriter(tmp_path)
    with pytest.raises(UsageError, match=r"FileSystemWriter\(page_cache='keep'\)"):
        holdfast.save(state(), storage_writer=writer, page_cache="keep")


class Disk:
    """A file whose disk and page cache take a stated time for a buffer, by a clock of its own."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        self.now, self.disk, self.copy, self.queued = 0.0, 1.0, 1.0, 0.0
        self.ways: list[str] = []
        monkeypatch.setattr(write_back, "_paces", {})
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "thread_time", lambda: 0.0)
        monkeypatch.setattr(write_back, "write_fully", self._write)
        monkeypatch.setattr(write_back, "start_write_back", lambda *_: None)
        monkeypatch.setattr(write_back, "await_write_back", self._await)

    def _write(self, fd: int, pieces: list[memoryview], offset: int) -> None:
        is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        self.now += self.disk if is_direct else self.copy
        self.queued = max(self.queued, self.now) + self.disk
        self.ways.append("past" if is_direct else "through")

    def _await(self, fd: int, offset: int, nbytes: int) -> None:
        self.now = max(self.now, self.queued - 4 * self.disk)

    def write(self, stretches: int) -> list[str]:
        """Write a file; what was the way of each 64 MiB."""
        self.ways.clear()
        output = BufferOutput(self.fd, "auto", stretches * STRETCH * BUFFER, stretches * STRETCH * BUFFER)
        buffer = memoryview(bytes(BUFFER))
        for number in range(stretches * STRETCH):
            output.write(buffer, number * BUFFER)
        output.end_buffers()
        return self.ways[::STRETCH]


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(tmp_path / "f", monkeypatch)
    yield disk
    os.close(disk.fd)


def test_a_disk_slower_than_copying_is_written_through_the_page_cache(disk: Disk) -> None:
    disk.disk, disk.copy = 8.0, 1.0
    assert disk.write(4) == ["through"] * 4


def test_a_disk_faster_than_copying_is_written_past_it_as_soon_as_that_is_known(disk: Disk) -> None:
    disk.disk, disk.copy = 0.5, 1.0
    assert disk.write(4) == ["through", "past", "past", "past"]
    assert disk.write(2) == ["past", "past"]  # the next file of the same disk


def test_a_disk_that_becomes_slow_is_noticed(disk: Disk) -> None:
    disk.disk, disk.copy = 0.5, 1.0
    disk.write(2)
    disk.disk = 8.0
    assert disk.write(3) == ["past", "through", "through"]


def test_without_room_in_memory_nothing_goes_through_the_page_cache(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_back, "room_for", lambda _: False)
    disk.disk, disk.copy = 8.0, 1.0
    assert disk.write(3) == ["past", "past", "past"]


def test_ranks_of_one_host_need_room_for_all_of_them(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_back, "room_for", lambda nbytes: nbytes < 512 * MIB)
    assert disk.write(1) == ["through"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert disk.write(1) == ["past"]
