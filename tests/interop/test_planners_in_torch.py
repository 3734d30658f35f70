"""Our default planners in torch's own save and load, with torch's storage and with ours."""

import itertools
import pickletools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import run_ranks
from tests.support.stock_torch import stock_load, stock_save
from torch.distributed.checkpoint import filesystem as torch_filesystem
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast.default_planner import EmptyStateDictLoadPlanner


def state_of(number: int) -> dict[str, Any]:
    return {
        "model": OrderedDict(w=torch.arange(12.0).reshape(3, 4) + number, b=torch.full((3,), number)),
        "step": number,
        "nested": {7: [torch.full((2,), number), "text"], "empty": {}},
    }


def assert_same(left: Any, right: Any) -> None:
    assert repr(left) == repr(right)


STORAGES = [torch_filesystem, holdfast.filesystem]


@pytest.mark.parametrize(("writing", "reading"), list(itertools.product(STORAGES, STORAGES)))
def test_torchs_save_and_load_with_our_planners(writing: Any, reading: Any, tmp_path: Path) -> None:
    writer, reader = writing.FileSystemWriter(tmp_path), reading.FileSystemReader(tmp_path)
    stock_save(state_of(5), storage_writer=writer, planner=holdfast.DefaultSavePlanner())
    into = state_of(0)
    stock_load(into, storage_reader=reader, planner=holdfast.DefaultLoadPlanner())
    assert_same(into, state_of(5))


def test_what_torch_stores_of_our_planner_names_nothing_of_ours(tmp_path: Path) -> None:
    stock_save(state_of(5), checkpoint_id=tmp_path, planner=holdfast.DefaultSavePlanner())
    text = [str(argument) for _, argument, _ in pickletools.genops((tmp_path / ".metadata").read_bytes())]
    assert not [argument for argument in text if "holdfast" in argument]
    into = {"model": state_of(0)["model"], "step": 0}
    stock_load(into, checkpoint_id=tmp_path)
    assert_same(into, {"model": state_of(5)["model"], "step": 5})


def test_a_state_is_built_by_our_planner_in_torchs_load(tmp_path: Path) -> None:
    stock_save(state_of(5), checkpoint_id=tmp_path)
    built: dict[str, Any] = {}
    reader: Any = torch_filesystem.FileSystemReader(tmp_path)
    planner: Any = EmptyStateDictLoadPlanner()
    state_dict_loader._load_state_dict(built, reader, no_dist=True, planner=planner)
    assert torch.equal(built["model"]["w"], state_of(5)["model"]["w"])
    assert built["nested"]["7"][1] == "text"


@pytest.mark.parametrize("writing", STORAGES)
def test_cached_plans_serve_torchs_saves(writing: Any, tmp_path: Path) -> None:
    planner = holdfast.DefaultSavePlanner(enable_plan_caching=True)
    for number in (1, 2, 3):
        writer = writing.FileSystemWriter(tmp_path / str(number))
        stock_save(state_of(number), storage_writer=writer, planner=planner)
        into = state_of(0)
        holdfast.load(into, checkpoint_id=writer.path)
        assert_same(into, state_of(number))


def test_a_subclass_that_changes_plans_works_in_both(tmp_path: Path) -> None:
    class Half(holdfast.DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            for item in plan.items:
                if item.tensor_data is not None and item.tensor_data.properties.dtype == torch.float32:
                    item.tensor_data.properties.dtype = torch.float16
            return plan

        def resolve_data(self, write_item: Any) -> Any:
            data = super().resolve_data(write_item)
            is_float = isinstance(data, torch.Tensor) and data.dtype == torch.float32
            return data.half() if is_float else data  # type: ignore[union-attr]

    stock_save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "torch", planner=Half())
    holdfast.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "ours", planner=Half())
    for place in ("torch", "ours"):
        into = torch.zeros(3, dtype=torch.float16)
        holdfast.load({"w": into}, checkpoint_id=tmp_path / place, cast=False)
        assert torch.equal(into, torch.ones(3, dtype=torch.float16))


def sharded(number: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(20.0).reshape(5, 4) + number
    return {"w": distribute_tensor(whole, mesh, [Shard(0)]), "same": torch.full((3,), number), "n": number}


def save_and_load(folder: Path) -> None:
    ours: Any = holdfast.DefaultSavePlanner()
    state_dict_saver.save(sharded(5), checkpoint_id=folder / "torch", planner=ours)
    writer: Any = holdfast.FileSystemWriter(folder / "ours")
    state_dict_saver.save(sharded(5), storage_writer=writer, planner=ours)
    for place in ("torch", "ours"):
        into = sharded(0)
        load_planner: Any = holdfast.DefaultLoadPlanner()
        state_dict_loader.load(into, checkpoint_id=folder / place, planner=load_planner)
        assert torch.equal(into["w"].full_tensor(), sharded(5)["w"].full_tensor())
        assert torch.equal(into["same"], torch.full((3,), 5))
        assert into["n"] == 5


@pytest.mark.slow
def test_ranks_save_and_load_with_our_planners_in_torch(tmp_path: Path) -> None:
    assert run_ranks(save_and_load, 2, tmp_path) == [("returned", None)] * 2
