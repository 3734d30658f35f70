"""Saves in the background by a process of their own: the same promises, also when the process is killed."""

import concurrent.futures
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.background.gated import HANG_GUARD, cancel_within_one_value, wait_until_it_writes

import holdfast
from holdfast._writer_process.client import start_writer_process, stop_writer_process
from holdfast.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from holdfast.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, SaveFuture, async_save

pytestmark = pytest.mark.slow

PROCESS = AsyncCheckpointerType.PROCESS


@pytest.fixture(scope="module", autouse=True)
def writer_process_is_stopped() -> Iterator[None]:
    yield
    stop_writer_process()


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((100, 100), float(value)), "step": int(value), "rows": [torch.ones(3), "text"]}


def loaded(folder: Path) -> float:
    found = state(-1)
    holdfast.load(found, checkpoint_id=folder)
    value = float(found["w"].unique().item())
    assert found["step"] == int(value)
    return value


def saving(*args: Any, **kwargs: Any) -> SaveFuture:
    future = async_save(*args, async_checkpointer_type=PROCESS, **kwargs)
    assert isinstance(future, SaveFuture)
    return future


def test_the_checkpoint_has_the_values_of_the_moment_of_the_call(tmp_path: Path) -> None:
    for value in range(3):
        original = state(value)
        future = saving(original, checkpoint_id=tmp_path / "c")
        original["w"].fill_(9)
        original["rows"].clear()
        future.result(HANG_GUARD)
        assert loaded(tmp_path / "c") == value
        assert future.progress().nbytes_done == future.progress().nbytes_total == 40012


@pytest.mark.parametrize(
    "stager",
    [
        DefaultStager(),
        DefaultStager(StagingOptions(use_shared_memory=False)),
        BlockingAsyncStager(),
    ],
    ids=["shared", "not shared", "custom"],
)
def test_every_stager_will_do(tmp_path: Path, stager: Any) -> None:
    answer = async_save(
        state(1), checkpoint_id=tmp_path / "c", async_stager=stager, async_checkpointer_type=PROCESS
    )
    future = answer.upload_completion if isinstance(answer, AsyncSaveResponse) else answer
    future.result(HANG_GUARD)
    assert loaded(tmp_path / "c") == 1.0


def test_a_failure_of_the_storage_is_told_by_the_future(tmp_path: Path) -> None:
    holdfast.save(state(1), checkpoint_id=tmp_path / "c")
    (tmp_path / "file").touch()
    bad = saving(state(2), checkpoint_id=tmp_path / "file" / "c")
    good = saving(state(2), checkpoint_id=tmp_path / "c")
    with pytest.raises(FileExistsError):
        bad.result(HANG_GUARD)
    good.result(HANG_GUARD)
    assert loaded(tmp_path / "c") == 2.0


class Waiting(holdfast.FileSystemWriter):
    """Asks for values in the writer process until it is cancelled or killed."""

    def write_data(self, plan: holdfast.SavePlan, planner: holdfast.SavePlanner) -> Any:
        (Path(self.path) / "reached").touch()
        for item in list(plan.items) * 1_000_000:
            planner.resolve_data(item)
        raise AssertionError("it was neither cancelled nor killed")


def test_a_save_is_cancelled_while_the_writer_process_writes(tmp_path: Path) -> None:
    holdfast.save(state(1), checkpoint_id=tmp_path / "c")
    future = saving(state(2), storage_writer=Waiting(tmp_path / "c"))
    wait_until_it_writes(tmp_path / "c", future)
    assert future.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(HANG_GUARD)
    assert loaded(tmp_path / "c") == 1.0


def test_progress_is_seen_and_cancelling_works_within_one_value(tmp_path: Path) -> None:
    cancel_within_one_value(saving, tmp_path)


def test_a_killed_writer_process_fails_its_save_and_the_next_one_has_another(tmp_path: Path) -> None:
    holdfast.save(state(1), checkpoint_id=tmp_path / "c")
    future = saving(state(2), storage_writer=Waiting(tmp_path / "c"))
    wait_until_it_writes(tmp_path / "c", future)
    pid = start_writer_process()
    assert pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(holdfast.CheckpointError, match="SIGKILL"):
        future.result(HANG_GUARD)
    assert loaded(tmp_path / "c") == 1.0
    saving(state(3), checkpoint_id=tmp_path / "c").result(HANG_GUARD)
    assert loaded(tmp_path / "c") == 3.0


def test_a_relative_folder_is_the_one_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("of the call", "of later"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "of the call")
    future = saving(state(1), checkpoint_id="c")
    monkeypatch.chdir(tmp_path / "of later")
    future.result(HANG_GUARD)
    assert loaded(tmp_path / "of the call" / "c") == 1
    assert os.listdir(tmp_path / "of later") == []
