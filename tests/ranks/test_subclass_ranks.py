"""Tensor subclasses on real ranks: in FSDP's parameters, saved at once and in the background."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.support.ranks import run_ranks
from tests.support.subclasses import BlockScaled, assert_same_parts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast
from holdfast.state_dict_saver import AsyncCheckpointerType

pytestmark = pytest.mark.slow

ROWS = 10


def state_of(seed: int) -> dict[str, Any]:
    """An optimizer state such as low-bit optimizers keep for a parameter that is divided by rows."""
    world, rank = dist.get_world_size(), dist.get_rank()
    share = -(-ROWS // world)
    start, stop = min(rank * share, ROWS), min((rank + 1) * share, ROWS)
    whole = BlockScaled.random(ROWS, 8, block=4, context=(ROWS, 8), seed=seed)
    local = BlockScaled(
        whole.codes[start:stop].clone(),
        whole.scale[start * 2 : stop * 2].clone(),
        whole.table,
        (stop - start, 8),
    )
    moment = DTensor.from_local(
        local,
        init_device_mesh("cpu", (world,)),
        [Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return {"state": {0: {"exp_avg": moment, "step": seed}}}


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
