"""The shipped suites, on the storage of the examples and on the plain planners."""

from pathlib import Path

import folder_storage
import pytest
import torch
from folder_storage import FolderReader, FolderWriter
from tests.support.checkpoints import flip_bit

import holdfast
from holdfast.errors import ChecksumError
from holdfast.testing import PlainLoadPlanner, PlainSavePlanner, PlannerContract, StorageContract


class TestFolderStorage(StorageContract):
    def make_writer(self, place: Path) -> holdfast.StorageWriter:
        return FolderWriter(place)

    def make_reader(self, place: Path) -> holdfast.StorageReader:
        return FolderReader(place)


class _NotChecked(TestFolderStorage):
    """The same storage for a reader that checks nothing; its name keeps pytest from collecting it."""


def test_the_suite_finds_a_storage_that_does_not_check_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_storage, "checked", lambda raw, crc32, path: raw)
    tests = ["changed_byte", "file_that_is_cut_short"]
    for test in tests:
        with pytest.raises(AssertionError, match="wrong values without an error"):
            getattr(_NotChecked(), f"test_a_{test}_is_noticed")(tmp_path / test)


def test_a_storage_may_declare_that_it_does_not_notice_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_NotChecked, "notices_damage", False)
    with pytest.raises(pytest.skip.Exception, match="declares"):
        _NotChecked().test_a_changed_byte_is_noticed(tmp_path / "checkpoint")


def test_the_example_raises_for_a_flipped_bit_and_names_the_file(tmp_path: Path) -> None:
    state = {"weight": torch.arange(100.0), "note": "text"}
    holdfast.save(state, storage_writer=FolderWriter(tmp_path))
    largest = max(tmp_path.glob("*.bin"), key=lambda file: file.stat().st_size)
    flip_bit(largest, 40)
    with pytest.raises(ChecksumError, match=largest.name):
        holdfast.load(state, storage_reader=FolderReader(tmp_path))


class TestPlainPlanners(PlannerContract):
    def make_save_planner(self) -> holdfast.SavePlanner:
        return PlainSavePlanner()

    def make_load_planner(self) -> holdfast.LoadPlanner:
        return PlainLoadPlanner()
