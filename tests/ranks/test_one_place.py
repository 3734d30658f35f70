"""All ranks of a save write to one place, and only files that have something in them."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from holdfast import FileSystemWriter
from holdfast._io.store import ByteStore
from holdfast._storage import arrival_check
from holdfast.errors import IncompleteWriteError, UsageError
from holdfast.testing import FakeRank, FakeRanks


def test_ranks_that_save_to_different_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"rank 0 saves to .*step-0 and rank 1 to .*step-1"):
        FakeRanks(2).run(
            lambda rank: rank.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / f"step-{rank.rank}")
        )
    assert not list(tmp_path.rglob(".metadata"))


def test_a_rank_without_items_makes_no_file(tmp_path: Path) -> None:
    for number in range(3):
        FakeRanks(4).run(lambda rank, number=number: rank.save({"n": number}, checkpoint_id=tmp_path))  # type: ignore[misc]
    assert len(list(tmp_path.glob("*.distcp"))) == 1


class OnADiskOfItsHost(FileSystemWriter):
    """A writer whose folder has the same path on every host, and is another one on each."""

    @property
    def checkpoint_id(self) -> str:
        return "/scratch/run"


def save_to_disks_of_hosts(rank: FakeRank, folder: Path) -> None:
    state = {f"w{number}": torch.ones(4) * number for number in range(8)}
    rank.save(state, storage_writer=OnADiskOfItsHost(folder / f"host-{rank.rank}"))


def test_disks_of_single_hosts_under_one_path_are_refused_and_left_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival_check, "WAIT_SECONDS", 0.2)
    with pytest.raises(IncompleteWriteError, match=r"not there.*storage that all hosts share") as caught:
        FakeRanks(2).run(lambda rank: save_to_disks_of_hosts(rank, tmp_path))
    assert (caught.value.expected, caught.value.found) == (1, 0)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_file_that_is_seen_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on network file systems that remember what a folder had."""
    looks = []
    absent = arrival_check._absent

    def see_late(store: ByteStore, files: Mapping[str, int]) -> list[str]:
        looks.append(list(files))
        return list(files) if len(looks) < 3 else absent(store, files)

    monkeypatch.setattr(arrival_check, "_absent", see_late)
    state = {f"w{number}": torch.ones(4) * number for number in range(8)}
    FakeRanks(2).run(lambda rank: rank.save(state, checkpoint_id=tmp_path))
    assert len(looks) == 3
    assert (tmp_path / ".metadata").exists()
    assert [name[:5] for name in looks[0]] == ["__1_0"]
