"""Checkpoints in somebody's own file system: whoever sets ``fs`` finds the files there, and nowhere else."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.stream_file_systems import (
    DiskFileSystem,
    ListedMemoryFileSystem,
    MemoryFileSystem,
    StreamReader,
    StreamWriter,
)

import holdfast as hf
from holdfast.errors import CheckpointNotFoundError, ChecksumError, StorageError, UsageError

PLACE = "mem://run/1"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test ends with nothing in the folder that it runs in."""
    MemoryFileSystem.files.clear()
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield
    assert os.listdir(folder) == []


def _save(value: float, fs: Any, place: str = PLACE, **options: Any) -> None:
    hf.save(
        {"a": torch.full((40_000,), value), "b": "text"}, storage_writer=StreamWriter(place, fs, **options)
    )


def _load(fs: Any, place: str = PLACE) -> float:
    state = {"a": torch.zeros(40_000), "b": ""}
    hf.load(state, storage_reader=StreamReader(place, fs))
    assert state["b"] == "text"
    tensor = state["a"]
    assert isinstance(tensor, torch.Tensor)
    assert torch.equal(tensor, tensor[:1].expand(40_000))
    return float(tensor[0])


@pytest.mark.parametrize("kind", [MemoryFileSystem, ListedMemoryFileSystem])
def test_each_save_replaces_the_one_before_and_its_files(kind: type[MemoryFileSystem]) -> None:
    for value in (1.0, 2.0, 3.0):
        _save(value, kind(), thread_count=2)
        assert _load(kind()) == value
        assert {name.rpartition("/")[0] for name in kind.files} == {PLACE}
        assert sorted(name[-7:] for name in kind.files) == [".distcp", ".distcp", "etadata"]


def test_a_rename_that_does_nothing_and_does_not_say_so_loses_no_checkpoint() -> None:
    class Silent(MemoryFileSystem):
        def rename(self, path: Any, new_path: Any) -> None:
            if str(new_path) not in self.files:
                super().rename(path, new_path)

    for value in (1.0, 2.0):
        _save(value, Silent())
        assert _load(Silent()) == value
    assert len(MemoryFileSystem.files) == 2


def test_a_first_start_is_told_where_files_cannot_be_listed() -> None:
    with pytest.raises(CheckpointNotFoundError, match="nothing is there"):
        _load(MemoryFileSystem())


def test_parts_of_ranks_are_found_where_files_cannot_be_listed() -> None:
    hf.save(
        {"a": torch.ones(3)}, storage_writer=StreamWriter(PLACE, MemoryFileSystem()), use_collectives=False
    )
    state = {"a": torch.zeros(3)}
    hf.load(state, storage_reader=StreamReader(PLACE, MemoryFileSystem()))
    assert state["a"].sum() == 3


def test_a_reader_and_a_writer_are_moved_to_another_place_of_their_file_system() -> None:
    fs = ListedMemoryFileSystem()
    writer, reader = StreamWriter(PLACE, fs), StreamReader(PLACE, fs)
    hf.save({"a": torch.ones(3)}, checkpoint_id="mem://run/2", storage_writer=writer)
    state = {"a": torch.zeros(3)}
    hf.load(state, checkpoint_id="mem://run/2", storage_reader=reader)
    assert state["a"].tolist() == [1, 1, 1]
    assert {name.rpartition("/")[0] for name in fs.files} == {"mem://run/2"}


def test_a_save_in_the_background_goes_there_too() -> None:
    writer = StreamWriter(PLACE, ListedMemoryFileSystem())
    saved: Any = hf.async_save({"a": torch.full((40_000,), 4.0), "b": "text"}, storage_writer=writer)
    saved.result()
    assert _load(ListedMemoryFileSystem()) == 4.0


def test_two_saves_at_once_are_refused_where_files_can_be_listed() -> None:
    fs = ListedMemoryFileSystem()
    first = StreamWriter(PLACE, fs)
    first.set_up_storage_writer(True, rank=0)
    first.prepare_global_plan([])
    with pytest.raises(StorageError, match="another save"):
        _save(1.0, fs)
    first.reset()
    _save(1.0, fs)
    assert _load(fs) == 1.0


def test_a_changed_byte_is_noticed() -> None:
    fs = MemoryFileSystem()
    _save(1.0, fs)
    (name,) = [name for name in fs.files if name.endswith(".distcp")]
    damaged = bytearray(fs.files[name])
    damaged[len(damaged) // 2] ^= 1
    fs.files[name] = bytes(damaged)
    with pytest.raises(ChecksumError, match="mem://run/1"):
        _load(fs)


def test_a_subclass_of_the_local_file_system_is_asked_for_every_file(tmp_path: Path) -> None:
    place = str(tmp_path / "checkpoint")
    DiskFileSystem.opened.clear()
    _save(5.0, DiskFileSystem(), place)
    assert {*os.listdir(place)} - {".metadata"} <= set(DiskFileSystem.opened)
    assert any(name.startswith(".metadata.") for name in DiskFileSystem.opened)
    assert _load(DiskFileSystem(), place) == 5.0
    # The files are the usual ones.
    hf.load({"a": torch.zeros(40_000), "b": ""}, checkpoint_id=place)


def test_torchs_own_local_file_system_is_a_local_folder(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystem  # noqa: PLC0415 - slow to import

    _save(6.0, FileSystem(), str(tmp_path / "checkpoint"))
    assert _load(FileSystem(), str(tmp_path / "checkpoint")) == 6.0


def test_torchs_file_system_of_fsspec_serves_our_storages() -> None:
    pytest.importorskip("fsspec")
    from torch.distributed.checkpoint._fsspec_filesystem import FileSystem  # noqa: PLC0415 - slow to import

    for value in (7.0, 8.0):
        _save(value, FileSystem(), "memory://holdfast/run")
        assert _load(FileSystem(), "memory://holdfast/run") == value


def test_a_url_without_a_file_system_for_it_is_refused() -> None:
    for call in (hf.save, hf.load):
        with pytest.raises(UsageError, match="nobody://bucket/run"):
            call({"a": torch.ones(1)}, checkpoint_id="nobody://bucket/run")
    with pytest.raises(UsageError, match="nobody://bucket/run"):
        hf.save({"a": torch.ones(1)}, storage_writer=hf.FileSystemWriter("nobody://bucket/run"))
    with pytest.raises(UsageError, match="nobody://bucket/run"):
        hf.load({"a": torch.ones(1)}, storage_reader=hf.FileSystemReader("nobody://bucket/run"))


def test_a_file_url_is_a_local_folder(tmp_path: Path) -> None:
    place = tmp_path / "a folder"
    hf.save({"a": torch.ones(2)}, checkpoint_id=f"file://{tmp_path}/a%20folder")
    assert ".metadata" in os.listdir(place)
    state = {"a": torch.zeros(2)}
    hf.load(state, checkpoint_id=f"file://{tmp_path}/a%20folder")
    assert state["a"].tolist() == [1, 1]
