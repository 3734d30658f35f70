"""Real process groups: one folder for all, sharded states saved together and loaded in another layout."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast.testing import with_checkpoint_logging, with_temp_dir

pytestmark = pytest.mark.slow


class Case:
    temp_dir = ""

    @with_temp_dir
    def agree(self) -> tuple[str, bool]:
        Path(self.temp_dir, f"{dist.get_rank()}").touch()
        dist.barrier()
        return self.temp_dir, len(list(Path(self.temp_dir).iterdir())) == dist.get_world_size()

    @with_temp_dir
    def fail_on_one(self) -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            raise ValueError("on purpose")


def use_temp_dir() -> tuple[str, bool, bool]:
    case = Case()
    folder, all_seen = case.agree()
    dist.barrier()
    gone = not Path(folder).exists()
    failing = Case()
    try:
        failing.fail_on_one()
    except ValueError:
        pass
    dist.barrier()
    return folder, all_seen, gone and not Path(failing.temp_dir).exists()


def test_ranks_share_a_folder_that_the_last_one_removes_also_on_failure() -> None:
    outcomes = run_ranks(use_temp_dir, 2)
    assert [kind for kind, _ in outcomes] == ["returned"] * 2, outcomes
    results = [value for _, value in outcomes]
    folders = {folder for folder, _, _ in results}
    assert len(folders) == 1
    assert all(seen and gone for _, seen, gone in results)


class Alone:
    temp_dir = ""

    @with_temp_dir
    def show(self, *, fail: bool) -> str:
        assert Path(self.temp_dir).is_dir()
        if fail:
            raise ValueError("on purpose")
        return self.temp_dir

    @with_checkpoint_logging
    def level(self) -> int:
        return logging.getLogger("holdfast").level

    @with_checkpoint_logging(logger_name="holdfast.some", level=logging.DEBUG)
    def fail_at_level(self) -> None:
        raise ValueError(logging.getLogger("holdfast.some").level)


def test_a_single_process_has_a_folder_of_its_own() -> None:
    case = Alone()
    assert not Path(case.show(fail=False)).exists()
    with pytest.raises(ValueError, match="on purpose"):
        case.show(fail=True)
    assert not Path(case.temp_dir).exists()


def test_the_logging_level_is_set_and_restored_also_on_failure() -> None:
    before = logging.getLogger("holdfast").level
    assert Alone().level() == logging.INFO
    assert logging.getLogger("holdfast").level == before
    with pytest.raises(ValueError, match=str(logging.DEBUG)):
        Alone().fail_at_level()
    assert logging.getLogger("holdfast.some").level == logging.NOTSET


def whole() -> torch.Tensor:
    return torch.arange(60.0).view(10, 6)


def save_sharded(folder: str) -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {
        "rows": distribute_tensor(whole(), mesh, [Shard(0)]),
        "columns": distribute_tensor(whole() + 1, mesh, [Shard(1)]),
        "replicated": distribute_tensor(whole() + 2, mesh, [Replicate()]),
        "plain": torch.ones(3),
        "step": 5,
    }
    metadata = holdfast.save(state, checkpoint_id=folder)
    return sorted(metadata.state_dict_metadata)


def load_sharded(folder: str) -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {
        "rows": distribute_tensor(torch.zeros(10, 6), mesh, [Shard(1)]),
        "columns": distribute_tensor(torch.zeros(10, 6), mesh, [Shard(0)]),
        "replicated": distribute_tensor(torch.zeros(10, 6), mesh, [Shard(0)]),
        "plain": torch.zeros(3),
        "step": 0,
    }
    holdfast.load(state, checkpoint_id=folder)
    rows: DTensor = state["rows"]
    return (
        torch.equal(rows.full_tensor(), whole())
        and torch.equal(state["columns"].full_tensor(), whole() + 1)
        and torch.equal(state["replicated"].full_tensor(), whole() + 2)
        and state["step"] == 5
    )


def test_three_ranks_save_and_two_load_in_other_layouts(tmp_path: Path) -> None:
    saved = run_ranks(save_sharded, 3, str(tmp_path / "c"))
    assert saved == [("returned", ["columns", "plain", "replicated", "rows", "step"])] * 3
    assert run_ranks(load_sharded, 2, str(tmp_path / "c")) == [("returned", True)] * 2
    alone = {"rows": torch.zeros(10, 6), "columns": torch.zeros(10, 6)}
    holdfast.load(alone, checkpoint_id=tmp_path / "c")
    assert torch.equal(alone["rows"], whole())
    assert torch.equal(alone["columns"], whole() + 1)


class UnpicklableError(Exception):
    def __reduce__(self) -> str:
        raise TypeError("not through this door")


class FailingPlanner(holdfast.DefaultSavePlanner):
    def create_local_plan(self) -> holdfast.SavePlan:
        if dist.get_rank() == 1:
            raise UnpicklableError("the real reason")
        return super().create_local_plan()


def save_failing(folder: str) -> str:
    try:
        holdfast.save({"a": torch.ones(2)}, checkpoint_id=folder, planner=FailingPlanner())
    except holdfast.CheckpointException as error:
        return str(error)
    return "no error"


def test_a_failure_on_one_rank_is_raised_on_all_with_its_cause(tmp_path: Path) -> None:
    results = run_ranks(save_failing, 2, str(tmp_path / "c"))
    for kind, message in results:
        assert kind == "returned"
        assert "rank 1" in message
        assert "the real reason" in message
    assert not (tmp_path / "c" / ".metadata").exists()
