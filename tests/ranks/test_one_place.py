"""All ranks of a save write to one place, and only files that have something in them."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.support.stock_torch import stock_save
from torch.distributed.tensor import Shard

import holdfast as hf
from holdfast import FileSystemReader, FileSystemWriter, HuggingFaceStorageReader
from holdfast._io.store import ByteStore
from holdfast._storage import arrival_check
from holdfast.errors import IncompleteCheckpointError, IncompleteWriteError, UsageError
from holdfast.testing import FakeRank, FakeRanks


def test_ranks_that_save_to_different_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"rank 0 saves to .*step-0 and rank 1 to .*step-1"):
        FakeRanks(2).run(
            lambda rank: rank.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / f"step-{rank.rank}")
        )
    assert not list(tmp_path.rglob(".metadata"))


def test_ranks_that_load_from_different_places_mix_no_checkpoints(tmp_path: Path) -> None:
    """Files of torch and of models have the same names in every checkpoint: nothing else tells them apart."""
    for number in range(2):
        folder = tmp_path / f"step-{number}"
        stock_save({"w": torch.full((8,), float(number))}, checkpoint_id=folder / "torch")
        save_file({"w": torch.full((8,), float(number))}, folder / "model.safetensors")
        hf.save({"w": torch.full((8,), float(number))}, checkpoint_id=folder / "ours")

    def load(rank: FakeRank, name: str) -> None:
        weight = rank.distribute(torch.zeros(8), rank.mesh(), [Shard(0)])
        folder = tmp_path / f"step-{rank.rank}"
        reader = HuggingFaceStorageReader(folder) if name == "model" else FileSystemReader(folder / name)
        rank.load({"w": weight}, storage_reader=reader)

    for name in ("torch", "model"):
        with pytest.raises(UsageError, match=r"rank 0 loads from .*step-0.* and rank 1 from .*step-1"):
            FakeRanks(2).run(lambda rank, name=name: load(rank, name))  # type: ignore[misc]
    with pytest.raises(IncompleteCheckpointError, match="step-1"):
        FakeRanks(2).run(lambda rank: load(rank, "ours"))
    # Copies on disks of single hosts may have paths of their own if their files cannot be those of others.
    shutil.copytree(tmp_path / "step-0" / "ours", tmp_path / "step-1" / "ours", dirs_exist_ok=True)
    FakeRanks(2).run(lambda rank: load(rank, "ours"))


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
