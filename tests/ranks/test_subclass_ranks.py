"""Tensor subclasses on real ranks: in FSDP's parameters, saved at once and in the background."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.optimizers import LowBit
from tests.support.ranks import run_ranks
from tests.support.subclasses import BlockScaled, assert_same_parts
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast
from holdfast.state_dict_saver import AsyncCheckpointerType

pytestmark = pytest.mark.slow

ROWS = 10


def moment_of(seed: int, rows: int, columns: int, block: int) -> DTensor:
    """What low-bit optimizers keep for a parameter that is divided by rows."""
    world, rank = dist.get_world_size(), dist.get_rank()
    share = -(-rows // world)
    start, stop = min(rank * share, rows), min((rank + 1) * share, rows)
    whole = BlockScaled.random(rows, columns, block=block, context=(rows, columns), seed=seed)
    per_row = columns // block
    local = BlockScaled(
        whole.codes[start:stop].clone(),
        whole.scale[start * per_row : stop * per_row].clone(),
        whole.table,
        (stop - start, columns),
    )
    return DTensor.from_local(
        local,
        init_device_mesh("cpu", (world,)),
        [Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def state_of(seed: int) -> dict[str, Any]:
    return {"state": {0: {"exp_avg": moment_of(seed, ROWS, 8, 4), "step": seed}}}


def save_and_load(folder: str) -> None:
    for name in ("save", "thread", "process"):
        place = f"{folder}/{name}"
        state = state_of(1)
        if name == "save":
            holdfast.save(state, checkpoint_id=place)
        else:
            kind = AsyncCheckpointerType(name)
            saving: Any = holdfast.async_save(state, checkpoint_id=place, async_checkpointer_type=kind)
            saving.result()
    load(folder)


def load(folder: str) -> None:
    for name in ("save", "thread", "process"):
        found, expected = state_of(2), state_of(1)
        holdfast.load(found, checkpoint_id=f"{folder}/{name}", strict=True)
        ours, theirs = (one["state"][0] for one in (found, expected))
        assert ours["step"] == 1
        assert_same_parts(ours["exp_avg"].to_local(), theirs["exp_avg"].to_local())


def test_what_some_ranks_save_others_load(tmp_path: Path) -> None:
    for outcome in run_ranks(save_and_load, 2, str(tmp_path)) + run_ranks(load, 4, str(tmp_path)):
        assert outcome == ("returned", None)
    whole = {"state": {0: {"exp_avg": BlockScaled.random(ROWS, 8, context=(ROWS, 8), seed=2), "step": 0}}}
    holdfast.load(whole, checkpoint_id=tmp_path / "process")
    assert_same_parts(whole["state"][0]["exp_avg"], BlockScaled.random(ROWS, 8, seed=1))


def low_bit(seed: int | None) -> tuple[LowBit, torch.nn.Parameter]:
    """An optimizer of a parameter that is divided by rows; without a seed it has not taken a step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(64, 64), mesh, [Shard(0)]))
    optimizer = LowBit([weight])
    if seed is not None:
        optimizer.state[weight] = {"step": seed, "exp_avg": moment_of(seed, 64, 64, 64)}
    return optimizer, weight


def save_by_torch(folder: str) -> None:
    optimizer, weight = low_bit(1)
    state_dict_saver.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    optimizer.state[weight]["exp_avg"].to_local().table.add_(dist.get_rank())
    state_dict_saver.save({"optimizer": optimizer.state_dict()}, checkpoint_id=f"{folder}/own tables")


def load_from_torch(folder: str, seed: int | None) -> None:
    optimizer, weight = low_bit(seed)
    holdfast.load({"optimizer": optimizer}, checkpoint_id=folder, safe_globals=[BlockScaled])
    found = optimizer.state[weight]
    assert found["step"] == 1
    expected = moment_of(1, 64, 64, 64)
    assert found["exp_avg"].placements == expected.placements
    assert_same_parts(found["exp_avg"].to_local(), expected.to_local())


def test_what_torch_saved_is_loaded_by_any_ranks_or_into_new_optimizers_by_as_many(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert [outcome for outcome, _ in run_ranks(save_by_torch, 2, folder)] == ["returned", "returned"]
    for world_size in (1, 2, 4):
        for outcome in run_ranks(load_from_torch, world_size, folder, 2):
            assert outcome == ("returned", None)
    for outcome in run_ranks(load_from_torch, 2, folder, None):
        assert outcome == ("returned", None)
    [(outcome, error)] = run_ranks(load_from_torch, 1, folder, None)
    assert outcome == "raised"
    assert "optimizer.state.0.exp_avg: " in str(error)
    assert "as many ranks, divided" in str(error)
    [(outcome, error)] = run_ranks(load_from_torch, 1, f"{folder}/own tables", 2)
    assert outcome == "raised"
    assert "optimizer.state.0.exp_avg.table is for the whole, and differs" in str(error)
