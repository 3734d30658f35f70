"""Garbage collection is off while a save or a load plans, and on while files are written and read."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf


class SavePlanner(hf.DefaultSavePlanner):
    def create_local_plan(self) -> hf.SavePlan:
        self.seen = {"planning": gc.isenabled()}
        return super().create_local_plan()

    def resolve_data(self, write_item: Any) -> Any:
        self.seen["writing"] = gc.isenabled()
        return super().resolve_data(write_item)


class LoadPlanner(hf.DefaultLoadPlanner):
    def create_local_plan(self) -> hf.LoadPlan:
        self.seen = {"planning": gc.isenabled()}
        return super().create_local_plan()

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.seen["reading"] = gc.isenabled()
        return super().resolve_tensor(read_item)


def test_only_planning_is_done_without_garbage_collection(tmp_path: Path) -> None:
    state = {"weight": torch.ones(3 << 18)}
    saves, loads = SavePlanner(), LoadPlanner()
    hf.save(state, checkpoint_id=tmp_path, planner=saves)
    hf.load(state, checkpoint_id=tmp_path, planner=loads)
    assert saves.seen == {"planning": False, "writing": True}
    assert loads.seen == {"planning": False, "reading": True}
    assert gc.isenabled()


def test_a_program_that_has_turned_it_off_finds_it_off(tmp_path: Path) -> None:
    gc.disable()
    try:
        hf.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_it_is_on_again_after_a_plan_that_fails(tmp_path: Path) -> None:
    hf.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path)
    with pytest.raises(hf.errors.MissingKeyError):
        hf.load({"other": torch.ones(3)}, checkpoint_id=tmp_path)
    assert gc.isenabled()
