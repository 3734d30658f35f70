"""Checkpoints of which a file is gone: nobody takes them for a first start, and no save removes the rest."""

import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoints import METADATA, committed_files, data_files, flip_bit, load
from tests.support.states import same, small_state

import holdfast as hf
from holdfast.errors import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    IntegrityError,
    WrongFolderError,
)

GOLDEN = Path(__file__).parents[1] / "golden"
Damage = Callable[[Path], object]


def remove_metadata(folder: Path) -> None:
    (folder / METADATA).unlink()


def move_metadata(folder: Path) -> None:
    (folder / METADATA).rename(folder / "moved.metadata")


def flip_metadata(folder: Path) -> None:
    flip_bit(folder / METADATA, 100)


def empty_metadata(folder: Path) -> None:
    (folder / METADATA).write_bytes(b"")


def put_old_metadata_back(folder: Path) -> None:
    (folder / METADATA).write_bytes(OLD[folder])


OLD: dict[Path, bytes] = {}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "checkpoint"
    hf.save(small_state(1), checkpoint_id=place)
    OLD[place] = (place / METADATA).read_bytes()
    hf.save(small_state(2), storage_writer=hf.FileSystemWriter(place, thread_count=2))
    return place


def train_as_people_do(folder: Path) -> int:
    """The idiom of many training scripts; returns the step that it begins at."""
    state = small_state(99)
    try:
        hf.load(state, checkpoint_id=folder)
    except FileNotFoundError:
        return 0
    return int(state["step"])


def test_a_missing_data_file_is_not_a_first_start(folder: Path) -> None:
    (folder / data_files(folder)[0]).unlink()
    rest = set(os.listdir(folder))
    with pytest.raises(
        IncompleteCheckpointError, match=r"__0_0-.*\.distcp .* is missing.*Put it back"
    ) as caught:
        train_as_people_do(folder)
    assert not isinstance(caught.value, FileNotFoundError)
    assert isinstance(caught.value, IntegrityError)
    assert caught.value.key
    assert set(os.listdir(folder)) == rest


def test_a_missing_file_of_one_value_names_that_value_alone(tmp_path: Path) -> None:
    hf.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path)
    (tmp_path / data_files(tmp_path)[0]).unlink()
    with pytest.raises(IncompleteCheckpointError, match=r": weight: __0_0-"):
        hf.load({"weight": torch.ones(3)}, checkpoint_id=tmp_path)


def test_a_missing_data_file_of_torch_or_of_an_own_part_is_not_a_first_start(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "torch-2.13" / "plain", tmp_path / "torch")
    hf.save(small_state(1), checkpoint_id=tmp_path / "own", use_collectives=False)
    for folder in (tmp_path / "torch", tmp_path / "own"):
        (folder / data_files(folder)[0]).unlink()
        with pytest.raises(IncompleteCheckpointError):
            hf.state_dict_loader._load_state_dict_from_keys(checkpoint_id=folder)


class StrangersReader(hf.FileSystemReader):
    def read_data(self, *_: Any) -> Any:
        raise FileNotFoundError(2, "No such file", "their/file")


def test_a_file_that_another_authors_storage_misses_is_not_a_first_start(folder: Path) -> None:
    with pytest.raises(IncompleteCheckpointError, match=r"a file of it is not: .*their/file") as caught:
        hf.load(small_state(99), storage_reader=StrangersReader(folder))
    assert not isinstance(caught.value, FileNotFoundError)
    assert caught.value.path == "their/file"


@pytest.mark.parametrize("golden", ["holdfast-1.0/plain", "torch-2.13/plain", "torch-2.13/sharded"])
def test_data_files_without_metadata_are_named_in_the_error_and_in_a_warning(
    tmp_path: Path, golden: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An interrupted first save looks so: the job may begin anew, but not in silence."""
    shutil.copytree(GOLDEN / golden, tmp_path / "c")
    files = data_files(tmp_path / "c")
    remove_metadata(tmp_path / "c")
    with pytest.raises(CheckpointNotFoundError) as caught:
        load(tmp_path / "c", {"a": torch.zeros(1)})
    names = "of save 01c2398bce4e" if "holdfast" in golden else f"in torch's naming ({', '.join(files)})"
    said = f"it has {len(files)} data file{'s' if len(files) > 1 else ''} {names}, but no .metadata"
    assert said in str(caught.value)
    assert names in caught.value.found
    assert [record.levelno for record in caplog.records if said in record.getMessage()] == [logging.WARNING]


def test_a_path_that_is_one_folder_too_short_is_not_a_first_start_and_names_the_newest(folder: Path) -> None:
    for number in range(7):
        shutil.copytree(folder, folder.parent / f"step-{number}")
        os.utime(folder.parent / f"step-{number}" / METADATA, (number, number))
    shutil.rmtree(folder)
    (folder.parent / "logs").mkdir()
    (folder.parent / "train.log").touch()
    with pytest.raises(WrongFolderError, match=r"step-6, step-5, step-4, .* and 2 more") as caught:
        train_as_people_do(folder.parent)
    assert not isinstance(caught.value, FileNotFoundError)
    assert caught.value.found == [f"step-{number}" for number in range(6, -1, -1)]
    assert str(folder.parent / "step-6") in str(caught.value)


def test_own_parts_one_folder_down_are_named_and_a_checkpoint_above_others_is_loaded(tmp_path: Path) -> None:
    hf.save(small_state(1), checkpoint_id=tmp_path / "runs" / "own", use_collectives=False)
    with pytest.raises(WrongFolderError, match="runs/own"):
        train_as_people_do(tmp_path / "runs")
    hf.save(small_state(2), checkpoint_id=tmp_path / "runs", use_collectives=False)
    assert same(load(tmp_path / "runs", small_state(99)), small_state(2))


def test_other_files_and_folders_are_a_first_start_and_are_told(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "train.log").touch()
    with pytest.raises(CheckpointNotFoundError, match=r"it has no \.metadata \(it has train\.log, logs/\)"):
        load(tmp_path, small_state(99))
    assert train_as_people_do(tmp_path) == 0


def test_an_empty_place_is_a_first_start_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert train_as_people_do(tmp_path) == 0
    assert train_as_people_do(tmp_path / "none") == 0
    assert not caplog.records


@pytest.mark.parametrize(
    "damage", [remove_metadata, move_metadata, flip_metadata, empty_metadata, put_old_metadata_back]
)
def test_saves_keep_the_data_files_of_a_checkpoint_whose_metadata_is_gone_and_name_them(
    folder: Path, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    precious = {name: (folder / name).read_bytes() for name in data_files(folder)}
    metadata = (folder / METADATA).read_bytes()
    damage(folder)
    for seed in (3, 4):  # the second save replaces the first, and nothing else
        caplog.clear()
        hf.save(small_state(seed), checkpoint_id=folder)
        (warning,) = [told for record in caplog.records if "they stay" in (told := record.getMessage())]
        assert all(name in warning for name in precious)
        assert committed_files(folder) | set(precious) == set(os.listdir(folder)) - {"moved.metadata"}
    assert same(load(folder, small_state(99)), small_state(4))
    (folder / METADATA).write_bytes(metadata)
    assert same(load(folder, small_state(99)), small_state(2))
    assert {name: (folder / name).read_bytes() for name in precious} == precious


def test_a_save_over_a_torch_checkpoint_without_metadata_keeps_its_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(GOLDEN / "torch-2.13" / "sharded", tmp_path / "c")
    remove_metadata(tmp_path / "c")
    hf.save(small_state(1), checkpoint_id=tmp_path / "c")
    assert {"__0_0.distcp", "__1_0.distcp"} < set(data_files(tmp_path / "c"))
    assert "2 data files in torch's naming (__0_0.distcp, __1_0.distcp)" in caplog.text


def test_own_parts_without_their_metadata_stay_when_other_parts_are_saved(tmp_path: Path) -> None:
    for seed in (1, 2):
        hf.save(small_state(seed), checkpoint_id=tmp_path, use_collectives=False)
    (tmp_path / "__0.metadata").rename(tmp_path / "moved")
    (precious,) = data_files(tmp_path)
    for seed in (3, 4):
        hf.save(small_state(seed), checkpoint_id=tmp_path, use_collectives=False)
        assert precious in data_files(tmp_path)
        assert len(data_files(tmp_path)) == 2
    hf.save(small_state(5), checkpoint_id=tmp_path)  # a joint one replaces all parts
    assert {precious, "moved", *committed_files(tmp_path)} == set(os.listdir(tmp_path))


class KilledWriter(hf.FileSystemWriter):
    """Dies when its data files are written."""

    def finish(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(folder: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            hf.save(small_state(7), storage_writer=KilledWriter(folder))
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_a_first_save_that_was_killed_is_a_first_start_and_goes_with_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for count in (1, 2):
        save_and_die(tmp_path)
        assert len(data_files(tmp_path)) == 1, f"the files of kill {count} alone"
        assert train_as_people_do(tmp_path) == 0
        assert "the save did not end" in caplog.text
    hf.save(small_state(3), checkpoint_id=tmp_path)
    assert set(os.listdir(tmp_path)) == committed_files(tmp_path)


def test_a_killed_save_into_a_place_whose_metadata_is_damaged_removes_nothing(folder: Path) -> None:
    save_and_die(folder)
    flip_metadata(folder)
    before = set(data_files(folder))
    hf.save(small_state(3), checkpoint_id=folder)
    assert before < set(data_files(folder))
