"""What a save must not damage: checkpoints of other folders, of earlier saves, of other ranks, and memory."""

import inspect
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import default_planner as stock_planners

import holdfast
from holdfast._io.local import LocalStore
from holdfast.errors import CheckpointExistsError
from holdfast.filesystem import FileSystemWriter
from holdfast.testing import FakeRank, FakeRanks


def state(value: float) -> dict[str, Any]:
    return {"x": torch.full((100,), value), "step": int(value)}


def loaded(folder: str | Path) -> float:
    found = state(-1.0)
    holdfast.load(found, checkpoint_id=folder)
    value = float(found["x"].unique().item())
    assert found["step"] == int(value)
    return value


def test_a_relative_path_means_the_folder_of_the_call_though_the_program_moves_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Moving(FileSystemWriter):
        def write_data(self, plan: holdfast.SavePlan, planner: holdfast.SavePlanner) -> Any:
            written = super().write_data(plan, planner)
            os.chdir(tmp_path / "b")
            return written

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        holdfast.save(state(1.0), checkpoint_id=tmp_path / name / "run")
    monkeypatch.chdir(tmp_path / "a")
    holdfast.save(state(2.0), storage_writer=Moving("run"))
    assert (loaded(tmp_path / "a" / "run"), loaded(tmp_path / "b" / "run")) == (2.0, 1.0)
    monkeypatch.chdir(tmp_path / "a")
    future = holdfast.async_save(state(3.0), checkpoint_id="run")
    os.chdir(tmp_path / "b")
    future.result()  # type: ignore[union-attr]
    assert (loaded(tmp_path / "a" / "run"), loaded(tmp_path / "b" / "run")) == (3.0, 1.0)


@pytest.mark.parametrize("planner", [holdfast.DefaultSavePlanner, stock_planners.DefaultSavePlanner])
def test_cached_plans_do_not_write_into_the_files_of_an_earlier_save(tmp_path: Path, planner: Any) -> None:
    if "enable_plan_caching" not in inspect.signature(planner).parameters:
        pytest.skip("this torch does not cache plans")
    caching = planner(enable_plan_caching=True)
    for value in range(4):
        holdfast.save(state(float(value)), checkpoint_id=tmp_path, planner=caching)
        assert loaded(tmp_path) == value
    assert len(list(tmp_path.glob("*.distcp"))) == 1


def test_a_failure_after_the_commit_removes_no_file_of_any_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = LocalStore.replace

    def save(rank: FakeRank, value: float) -> None:
        own = {f"rank {rank.rank}": torch.full((3,), value)}
        rank.save({**state(value), **own}, checkpoint_id=tmp_path)

    def failing(self: LocalStore, name: str, *pieces: Any, **options: Any) -> None:
        replace(self, name, *pieces, **options)
        if name == ".metadata":
            raise OSError(5, "the folder could not be flushed")

    FakeRanks(2).run(lambda rank: save(rank, 1.0))
    monkeypatch.setattr(LocalStore, "replace", failing)
    errors = FakeRanks(2).attempt(lambda rank: save(rank, 2.0))
    assert all(isinstance(error, OSError) for error in errors)
    monkeypatch.undo()
    found = {**state(-1.0), "rank 0": torch.zeros(3), "rank 1": torch.zeros(3)}
    holdfast.load(found, checkpoint_id=tmp_path)
    assert [found[key].unique().item() for key in ("x", "rank 0", "rank 1")] == [2.0] * 3


def test_a_checkpoint_that_appears_before_the_folder_is_claimed_is_not_replaced(tmp_path: Path) -> None:
    class Late(FileSystemWriter):
        """Plans while another save commits."""

        def prepare_local_plan(self, plan: holdfast.SavePlan) -> holdfast.SavePlan:
            plan = super().prepare_local_plan(plan)
            holdfast.save(state(1.0), checkpoint_id=tmp_path)
            return plan

    with pytest.raises(CheckpointExistsError):
        holdfast.save(state(2.0), storage_writer=Late(tmp_path, overwrite=False))
    assert loaded(tmp_path) == 1.0


def test_a_save_in_the_background_may_load_what_it_has_just_committed(tmp_path: Path) -> None:
    class Verifying(FileSystemWriter):
        def finish(self, metadata: holdfast.Metadata, results: Any) -> None:
            super().finish(metadata, results)
            verified.append(loaded(tmp_path))

    verified: list[float] = []
    future: Any = holdfast.async_save(state(1.0), storage_writer=Verifying(tmp_path))
    waiting = threading.Thread(target=future.exception, daemon=True)
    waiting.start()
    waiting.join(60)
    assert future.done()
    assert verified == [1.0]


def test_a_load_waits_for_a_save_to_its_place_however_that_is_spelled(tmp_path: Path) -> None:
    class Gated(FileSystemWriter):
        def write_data(self, plan: holdfast.SavePlan, planner: holdfast.SavePlanner) -> Any:
            reached.set()
            assert may_go.wait(60)
            return super().write_data(plan, planner)

    holdfast.save(state(1.0), checkpoint_id=tmp_path)
    reached, may_go = threading.Event(), threading.Event()
    future: Any = holdfast.async_save(state(2.0), storage_writer=Gated(tmp_path))
    assert reached.wait(60)
    found: list[float] = []
    loading = threading.Thread(target=lambda: found.append(loaded(f"file://{tmp_path}")))
    loading.start()
    loading.join(0.3)  # a load that does not wait is done within this time
    may_go.set()
    loading.join(60)
    future.result(60)
    assert found == [2.0]
