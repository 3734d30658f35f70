"""Checkpoints that ranks write each for itself load whole in any world size, or are refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast as hf

WHOLE = torch.arange(24.0).view(12, 2)


def save_own_parts(folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(WHOLE, mesh, [Shard(0)])
    hf.save({"weight": weight, "step": 7}, checkpoint_id=f"{folder}/alike", use_collectives=False)
    hf.save({"weight": weight, "rank": dist.get_rank()}, checkpoint_id=f"{folder}/own", use_collectives=False)
    dist.barrier()


def load_own_parts(folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[str, Any] = {}
    for name, extra in {"alike": "step", "own": "rank"}.items():
        weight = DTensor.from_local(torch.zeros_like(WHOLE), mesh, [Replicate()], run_check=False)
        state = {"weight": weight, extra: -1}
        try:
            hf.load(state, checkpoint_id=f"{folder}/{name}")
        except Exception as error:
            found[name] = str(error)
        else:
            found[name] = (weight.to_local().tolist(), state[extra])
    return found


@pytest.mark.slow
def test_parts_load_whole_in_any_world_size_or_are_refused(tmp_path: Path) -> None:
    assert [kind for kind, _ in run_ranks(save_own_parts, 2, str(tmp_path))] == ["returned"] * 2
    for world_size in (1, 2, 3):
        for rank, (kind, found) in enumerate(run_ranks(load_own_parts, world_size, str(tmp_path))):
            assert kind == "returned", found
            assert found["alike"] == (WHOLE.tolist(), 7)
            if world_size == 2:
                assert found["own"] == (WHOLE.tolist(), rank)
            else:
                assert "2 ranks" in found["own"]
                assert "rank: " in found["own"]
    (tmp_path / "alike" / "__1.metadata").unlink()
    ((_, found),) = run_ranks(load_own_parts, 1, str(tmp_path))
    assert "IncompleteCheckpointError" in found["alike"]
    assert "parts of rank 1 are missing" in found["alike"]


def load_each_from_its_own_folder(folder: str) -> list[str]:
    """As on disks of the ranks' own machines."""
    mine = f"{folder}/{dist.get_rank()}"
    raised = []
    for name in ("first", "damaged"):
        try:
            hf.load({"a": torch.zeros(1)}, checkpoint_id=f"{mine}/{name}")
        except hf.CheckpointException as error:
            raised.append("first start" if isinstance(error, FileNotFoundError) else str(error))
        if name == "first":
            hf.save({"a": torch.ones(1)}, checkpoint_id=f"{mine}/damaged", use_collectives=False)
            dist.barrier()
            if dist.get_rank() == 1:
                shutil.rmtree(f"{mine}/damaged")
    return raised


@pytest.mark.slow
def test_a_rank_that_finds_nothing_where_others_find_their_parts_is_no_first_start(tmp_path: Path) -> None:
    for kind, raised in run_ranks(load_each_from_its_own_folder, 3, str(tmp_path)):
        assert kind == "returned", raised
        assert raised[0] == "first start"
        assert "rank 1 of 3 found no part of the checkpoint, the others did" in raised[1]
