"""Full disks and files that may not grow: errno, path and key; the old checkpoint stays (A1 to A3, B3)."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoints import committed_files, contents, load
from tests.support.process import assert_no_more_threads_than, file_size_limit, living_threads
from tests.support.states import MIB, same
from tests.support.tools import small_disk

import holdfast as hf
from holdfast.extension import ZStandard
from holdfast.filesystem import FileSystemWriter
from holdfast.state_dict_saver import AsyncCheckpointerType

WRITERS: dict[str, dict[str, Any]] = {
    "1 thread": {},
    "3 threads": {"thread_count": 3},
    "a file per item": {"single_file_per_rank": False, "thread_count": 2},
    "zstd": {"_extensions": [ZStandard()]},
    "not durable": {"sync_files": False},
}


def _state(seed: int, mib: int, count: int = 4) -> dict[str, Any]:
    bits = torch.Generator().manual_seed(seed)
    big = {f"big{n}": torch.randn(mib * MIB // 4, generator=bits) for n in range(count)}
    return {**big, "note": f"state {seed}"}


@pytest.mark.parametrize("options", WRITERS.values(), ids=WRITERS)
def test_a_file_that_may_not_grow_is_raised_with_errno_and_path(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Only the file of the largest tensor is too large; the other writers could have gone on."""
    folder = tmp_path / "checkpoint"
    hf.save(_state(1, 1), checkpoint_id=folder)
    before, threads = contents(folder), living_threads()
    state = {**_state(2, 1), "huge": torch.randn(5 * MIB, generator=torch.Generator().manual_seed(2))}
    with file_size_limit(10 * MIB), pytest.raises(OSError) as caught:
        hf.save(state, storage_writer=FileSystemWriter(folder, **options))
    assert caught.value.errno == errno.EFBIG
    _assert_names_a_file(caught.value, folder)
    assert_no_more_threads_than(threads)
    after = contents(folder)
    assert {name: after.get(name) for name in before} == before
    assert same(load(folder, _state(9, 1)), _state(1, 1))
    hf.save(state, storage_writer=FileSystemWriter(folder, **options))
    assert same(load(folder, {**_state(9, 1), "huge": torch.zeros(5 * MIB)}), state)
    assert set(os.listdir(folder)) == committed_files(folder)


def _assert_names_a_file(error: OSError, folder: Path) -> None:
    assert error.filename is not None
    assert os.path.dirname(error.filename) == str(folder)
    assert error.filename in str(error)


@pytest.mark.parametrize(
    "options",
    [
        WRITERS["1 thread"],
        WRITERS["a file per item"],
        WRITERS["zstd"],
        WRITERS["not durable"],
    ],
    ids=["1 thread", "a file per item", "zstd", "not durable"],
)
def test_a_file_that_may_not_grow_is_raised_with_the_key(tmp_path: Path, options: dict[str, Any]) -> None:
    with file_size_limit(4 * MIB), pytest.raises(OSError) as caught:
        hf.save({"huge": torch.rand(2 * MIB)}, storage_writer=FileSystemWriter(tmp_path, **options))
    assert caught.value.errno == errno.EFBIG
    assert "huge" in str(caught.value)


def test_a_file_that_may_not_grow_names_a_key_when_only_small_values_are_written(tmp_path: Path) -> None:
    with file_size_limit(512), pytest.raises(OSError) as caught:
        hf.save({"tiny": torch.ones(100)}, checkpoint_id=tmp_path)
    assert caught.value.errno == errno.EFBIG
    assert "tiny" in str(caught.value)


def test_metadata_that_may_not_grow_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """The data fits, the commit does not: nothing of it is seen."""
    names = [f"{n:0>200}" for n in range(300)]

    def state(value: int) -> dict[str, Any]:
        return {name: torch.tensor(value) for name in names}

    hf.save(state(1), storage_writer=FileSystemWriter(tmp_path, single_file_per_rank=False))
    before = contents(tmp_path)
    limit = len(before[".metadata"]) - 1
    assert max(len(data) for name, data in before.items() if name != ".metadata") < limit
    with file_size_limit(limit), pytest.raises(OSError) as caught:
        hf.save(state(2), storage_writer=FileSystemWriter(tmp_path, single_file_per_rank=False))
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / ".metadata"))
    after = contents(tmp_path)
    assert {name: after.get(name) for name in before} == before
    assert not [name for name in after if name.endswith(".tmp")]
    assert same(load(tmp_path, state(9)), state(1))


@pytest.mark.parametrize("options", [WRITERS["3 threads"], WRITERS["a file per item"]])
def test_a_save_that_failed_leaves_nothing_on_the_disk(tmp_path: Path, options: dict[str, Any]) -> None:
    hf.save(_state(1, 1), checkpoint_id=tmp_path)
    before = contents(tmp_path)
    state = {**_state(2, 1), "note": b"x" * (12 * MIB)}
    with file_size_limit(10 * MIB), pytest.raises(OSError):
        hf.save(state, storage_writer=FileSystemWriter(tmp_path, **options))
    assert contents(tmp_path) == before


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB of its own."""
    with small_disk("tmpfs", tmp_path / "disk") as folder:
        yield folder


@pytest.mark.parametrize("options", WRITERS.values(), ids=WRITERS)
def test_a_full_disk_leaves_the_old_checkpoint_bit_for_bit(disk: Path, options: dict[str, Any]) -> None:
    folder = disk / "checkpoint"
    hf.save(_state(1, 2), storage_writer=FileSystemWriter(folder, **options))
    before, threads = contents(folder), living_threads()
    for attempt in range(3):
        state = _state(2 + attempt, 6)
        with pytest.raises(OSError) as caught:
            hf.save(state, storage_writer=FileSystemWriter(folder, **options))
        assert caught.value.errno == errno.ENOSPC
        _assert_names_a_file(caught.value, folder)
        assert_no_more_threads_than(threads)
        after = contents(folder)
        assert {name: after.get(name) for name in before} == before
    assert same(load(folder, _state(9, 2)), _state(1, 2))


@pytest.mark.parametrize("options", WRITERS.values(), ids=WRITERS)
def test_after_a_full_disk_the_next_save_works_once_there_is_space(
    disk: Path, options: dict[str, Any]
) -> None:
    folder = disk / "checkpoint"
    hf.save(_state(1, 1), storage_writer=FileSystemWriter(folder, **options))
    (disk / "other").write_bytes(bytes(15 * MIB))
    with pytest.raises(OSError) as caught:
        hf.save(_state(2, 2), storage_writer=FileSystemWriter(folder, **options))
    assert caught.value.errno == errno.ENOSPC
    (disk / "other").unlink()
    hf.save(_state(2, 2), storage_writer=FileSystemWriter(folder, **options))
    assert same(load(folder, _state(9, 2)), _state(2, 2))
    assert set(os.listdir(folder)) == committed_files(folder)


def test_after_a_failed_save_the_disk_has_as_much_space_as_before(disk: Path) -> None:
    folder = disk / "checkpoint"
    hf.save(_state(1, 1), checkpoint_id=folder)
    free = shutil.disk_usage(disk).free
    with pytest.raises(OSError):
        hf.save(_state(2, 6), storage_writer=FileSystemWriter(folder, single_file_per_rank=False))
    assert shutil.disk_usage(disk).free == free


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_full_disk_in_the_background_is_told_by_the_future_and_loses_nothing(disk: Path, kind: str) -> None:
    folder = disk / "checkpoint"
    by = AsyncCheckpointerType(kind)
    hf.save(_state(1, 1), checkpoint_id=folder)
    before, free = contents(folder), shutil.disk_usage(disk).free
    failing: Any = hf.async_save(_state(2, 6), checkpoint_id=folder, async_checkpointer_type=by)
    with pytest.raises(OSError) as caught:
        failing.result()
    assert caught.value.errno == errno.ENOSPC
    _assert_names_a_file(caught.value, folder)
    assert contents(folder) == before
    assert shutil.disk_usage(disk).free == free
    hf.async_save(_state(3, 1), checkpoint_id=folder, async_checkpointer_type=by).result()  # type: ignore[union-attr]
    assert same(load(folder, _state(9, 1)), _state(3, 1))
