"""What a load leaves in the page cache, and that every way of reading gives the same bytes and errors."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.cached import cached_share, forget, read_from_disk

import holdfast as hf
from holdfast._io import cold_reads
from holdfast.errors import ChecksumError, TruncatedFileError, UsageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is in the page cache")

MIB = 1 << 20
CHOICES = ["auto", "keep", "bypass"]


def state() -> dict[str, torch.Tensor]:
    numbers = torch.arange(9 * MIB // 4 + 3)
    return {"large": numbers, "odd": numbers[: MIB + 7].to(torch.float64), "small": torch.ones(3)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    hf.save(state(), checkpoint_id=tmp_path / "checkpoint")
    forget(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture(autouse=True)
def unknown_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_reads, "_devices", {})


def load(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    target = {key: torch.zeros_like(value) for key, value in state().items()}
    hf.load(target, checkpoint_id=folder, **options)
    return target


def is_right(loaded: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(loaded[key], value) for key, value in state().items())


def data_file(folder: Path) -> Path:
    return next(folder.glob("*.distcp"))


def test_a_load_that_keeps_leaves_all_in_memory_for_the_next_one(saved: Path) -> None:
    assert is_right(load(saved, page_cache="keep"))
    assert cached_share(data_file(saved)) > 0.99
    before = read_from_disk()
    assert is_right(load(saved))
    assert read_from_disk() == before


def test_a_load_that_bypasses_leaves_nothing_but_what_is_small(saved: Path) -> None:
    assert is_right(load(saved, page_cache="bypass"))
    assert cached_share(data_file(saved)) < 0.1


def test_auto_keeps_where_memory_has_room(saved: Path) -> None:
    assert is_right(load(saved))
    assert cached_share(data_file(saved)) > 0.99


def test_auto_bypasses_where_memory_has_no_room_for_what_is_loaded(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def no_room(nbytes: int) -> bool:
        asked.append(nbytes)
        return False

    monkeypatch.setattr(cold_reads, "room_for", no_room)
    assert is_right(load(saved))
    assert cached_share(data_file(saved)) < 0.1
    nbytes = sum(value.nbytes for value in state().values())
    assert asked
    assert all(nbytes <= each < 1.1 * nbytes for each in asked)


def test_auto_bypasses_once_the_disk_is_known_to_be_faster_than_copying(saved: Path) -> None:
    device = os.stat(saved).st_dev
    cold_reads._devices[device] = cold_reads._Device(nbytes=64 * MIB, worked=0.9, passed=1.0)
    assert is_right(load(saved))
    assert cached_share(data_file(saved)) < 0.1
    cold_reads._devices[device] = cold_reads._Device(nbytes=64 * MIB, worked=0.2, passed=1.0)
    assert is_right(load(saved))
    assert cached_share(data_file(saved)) > 0.99


def test_cold_reads_through_the_cache_tell_how_fast_the_disk_is(saved: Path) -> None:
    load(saved)
    found = cold_reads._devices[os.stat(saved).st_dev]
    assert found.nbytes > 9 * MIB
    assert 0 < found.worked <= found.passed


@pytest.mark.parametrize("is_hot", [True, False], ids=["hot", "cold"])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_flipped_bit_is_found_whichever_way_it_is_read(saved: Path, choice: str, is_hot: bool) -> None:
    path = data_file(saved)
    with path.open("r+b") as file:
        file.seek(7 * MIB + 5)
        byte = file.read(1)[0]
        file.seek(7 * MIB + 5)
        file.write(bytes([byte ^ 4]))
    if is_hot:
        path.read_bytes()
    else:
        forget(saved)
    with pytest.raises(ChecksumError, match="large"):
        load(saved, page_cache=choice)


@pytest.mark.parametrize("is_hot", [True, False], ids=["hot", "cold"])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_file_that_is_cut_while_it_is_read_is_an_error(saved: Path, choice: str, is_hot: bool) -> None:
    path = data_file(saved)
    if is_hot:
        path.read_bytes()

    def cut(_: object) -> None:
        os.truncate(path, 4 * MIB)

    reader = hf.FileSystemReader(saved, thread_count=1, page_cache=choice)  # type: ignore[arg-type]
    target = {key: torch.zeros_like(value) for key, value in state().items()}
    with pytest.raises(TruncatedFileError):
        hf.load(target, storage_reader=reader, progress=cut)


def test_the_option_belongs_to_the_reader_that_is_passed(saved: Path) -> None:
    with pytest.raises(UsageError, match=r"FileSystemReader\(page_cache='keep'\)"):
        load(saved, storage_reader=hf.FileSystemReader(saved), page_cache="keep")
    with pytest.raises(UsageError, match="'auto', 'keep', 'bypass'"):
        load(saved, page_cache="sometimes")
