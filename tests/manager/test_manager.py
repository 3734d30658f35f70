"""A manager of one process: what is saved, kept, found and restored."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoints import data_file, flip_bit
from tests.support.ranks import python_environment
from tests.support.stock_torch import stock_save

import holdfast as hf
from holdfast._staging import staging_copy
from holdfast._staging.staging_copy import copy_spans
from holdfast.cli import main
from holdfast.errors import CheckpointNotFoundError, ChecksumError, MissingKeyError, UsageError
from holdfast.manager import (
    Best,
    CheckpointManager,
    Continuous,
    Every,
    EverySeconds,
    EverySteps,
    First,
    Last,
    Preempted,
    Steps,
)
from holdfast.state_dict_saver import AsyncCheckpointerType


def state_of(step: float) -> dict[str, Any]:
    return {"w": torch.full((100,), float(step)), "n": step}


def empty() -> dict[str, Any]:
    return {"w": torch.zeros(100), "n": -1}


def damage_data(folder: Path) -> None:
    flip_bit(data_file(folder), data_file(folder).stat().st_size // 2)


def folders(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if not name.startswith("."))


@pytest.mark.parametrize("name", ["step-{step}", "checkpoint-{step}", "{step}", "{step:06d}"])
def test_steps_are_saved_kept_and_restored(tmp_path: Path, name: str) -> None:
    with CheckpointManager(tmp_path / "run", keep=Last(2) | Every(30), name=name) as manager:
        assert manager.restore(empty()) is None
        assert manager.latest() is None
        for step in (10, 30, 50, 100, 1000):
            manager.save(step, state_of(step))
        manager.wait()
        assert manager.steps() == [30, 100, 1000]
    state = empty()
    restored = CheckpointManager(tmp_path / "run", name=name).restore(state)
    assert restored is not None
    assert (restored.step, state["n"], float(state["w"][0])) == (1000, 1000, 1000.0)
    assert folders(tmp_path / "run") == sorted(name.format(step=step) for step in (30, 100, 1000))


def test_metrics_are_committed_with_the_step_and_survive_a_restart(tmp_path: Path) -> None:
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: float("nan"), 5: 3.0}
    with CheckpointManager(tmp_path, keep=Best(2, "loss"), metadata={"name": "a run"}) as manager:
        for step, loss in losses.items():
            manager.async_save(step, state_of(step), metrics={"loss": loss}, metadata={"tokens": step})
    assert manager.steps() == [2, 5]
    for forgetful in (False, True):
        if forgetful:
            (tmp_path / ".holdfast-index.json").write_text("not json")
        again = CheckpointManager(tmp_path, keep=Best(2, "loss"))
        assert again.best("loss") == 2
        assert again.best("loss", highest=True) == 5
        assert again.best("accuracy") is None
        assert (again.metrics(2), again.metadata(5)) == ({"loss": 1.0}, {"tokens": 5})
        assert again.run_metadata == {"name": "a run"}
    again.save(6, state_of(6), metrics={"loss": 2.0})
    again.close()
    assert again.steps() == [2, 6]
    restored = again.restore(empty())
    assert restored is not None
    assert (restored.metrics, restored.metadata) == ({"loss": 2.0}, {})


def test_a_metric_of_the_same_step_saved_again_is_the_new_one(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(1), metrics={"loss": 5.0})
        assert manager.best("loss") == 1
        manager.save(2, state_of(2), metrics={"loss": 3.0})
        assert manager.best("loss") == 2
        manager.save(2, state_of(2), metrics={"loss": 7.0})
        assert manager.best("loss") == 1


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "metadata", "no commit"])
def test_a_damaged_newest_step_does_not_stop_a_restore_and_is_named(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = CheckpointManager(tmp_path, keep=Last(1))
    unlimited = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        unlimited.save(step, state_of(step))
    newest = tmp_path / "step-3"
    if damage == "flip":
        damage_data(newest)
    elif damage == "cut":
        os.truncate(data_file(newest), 100)
    elif damage == "missing":
        data_file(newest).unlink()
    elif damage == "metadata":
        flip_bit(newest / ".metadata", 50)
        os.truncate(newest / ".metadata", 300)
    else:
        (newest / ".metadata").unlink()
    if damage != "flip":  # what only reading every byte would show
        assert manager.prune() == [1]
    before = folders(newest)
    state = empty()
    restored = manager.restore(state)
    assert restored is not None
    assert (restored.step, state["n"]) == (2, 2)
    assert folders(newest) == before
    assert list(restored.skipped) == [3]
    if damage == "no commit":
        assert "step 3 is not tried: it is not complete: step-3 has no .metadata" in caplog.text
    else:
        assert "step 3 cannot be restored" in caplog.text
        assert manager.latest() == 2, "what is known to be damaged counts for nothing"
        capsys.readouterr()
        assert main(["ls", str(tmp_path)]) == 0
        assert " complete, 1 damaged, " in capsys.readouterr().out.splitlines()[-1]
    manager.prune()
    assert 2 in manager.steps()
    with pytest.raises(hf.CheckpointError):
        manager.restore(empty(), step=3)
    manager.save(3, state_of(3))
    assert manager.latest() == 3


def test_a_state_that_does_not_fit_is_not_looked_for_in_older_steps(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, {**state_of(1), "more": 1})
    manager.save(2, state_of(2))
    with pytest.raises(MissingKeyError):
        manager.restore({**empty(), "more": 0})


def test_damage_found_while_reading_is_raised_if_a_load_may_leave_something_out(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, state_of(1))
    manager.save(2, state_of(2))
    damage_data(tmp_path / "step-2")
    with pytest.raises(ChecksumError):
        manager.restore(empty(), allow_partial_load=True)


def test_a_run_that_goes_back_is_told_so_and_goes_on_from_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path, keep=Last(2))
    for step in (10, 20, 30):
        manager.save(step, state_of(step))
    manager.close()
    again = CheckpointManager(tmp_path, keep=Last(2))
    again.restore(empty(), step=20)
    assert "goes back" not in caplog.text
    again.save(25, state_of(25))
    assert "goes back" in caplog.text
    again.wait()
    assert again.steps() == [20, 25]
    assert CheckpointManager(tmp_path).latest() == 25
    again.save(30, state_of(31))
    again.close()
    assert again.steps() == [25, 30]


def test_a_step_that_is_saved_again_after_going_back_counts_as_new(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (10, 20, 30):
            manager.save(step, state_of(step))
        manager.save(15, state_of(15))
        assert manager.steps() == [20, 30, 10, 15]
        manager.save(20, state_of(21))
        assert manager.steps() == [30, 10, 15, 20]


def test_pins_hold_until_they_are_taken_back(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=Last(1)) as manager:
        manager.save(1, state_of(1))
        manager.pin(1)
        manager.save(2, state_of(2))
        manager.save(3, state_of(3))
        manager.wait()
        assert manager.steps() == [1, 3]
        manager.unpin(1)
        assert manager.prune(dry_run=True) == [1]
        assert manager.prune() == [1]
        with pytest.raises(CheckpointNotFoundError, match="newest ones: 3"):
            manager.pin(1)


def test_checkpoints_of_stock_torch_count_and_other_folders_do_not(tmp_path: Path) -> None:
    stock_save(state_of(5), checkpoint_id=tmp_path / "step-5")
    (tmp_path / "logs").mkdir()
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / "__0_0.distcp").write_bytes(b"half")
    with CheckpointManager(tmp_path, keep=Last(1)) as manager:
        assert manager.steps() == [5]
        state = empty()
        restored = manager.restore(state)
        assert restored is not None
        assert (restored.step, restored.metrics, state["n"]) == (5, {}, 5)
        manager.save(6, state_of(6))
        manager.wait()
    assert folders(tmp_path) == ["logs", "step-6", "step-7"]


def test_a_cut_file_of_stock_torch_costs_no_sound_step(tmp_path: Path) -> None:
    for step in (4, 5):
        stock_save(state_of(step), checkpoint_id=tmp_path / f"step-{step}")
    cut = data_file(tmp_path / "step-5")
    os.truncate(cut, cut.stat().st_size // 2)
    with CheckpointManager(tmp_path, keep=Last(1)) as manager:
        assert manager.prune() == []
    assert folders(tmp_path) == ["step-4", "step-5"]


def test_a_failed_deletion_does_not_end_pruning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        manager.save(step, state_of(step))
    real = os.unlink

    def refuse(path: Any, *args: Any, **options: Any) -> None:
        if "step-1" in str(path) and str(path).endswith(".distcp"):
            raise PermissionError(13, "not now", str(path))
        real(path, *args, **options)

    pruner = CheckpointManager(tmp_path, keep=Last(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        assert pruner.prune() == [2]
    assert pruner.steps() == [3]
    assert folders(tmp_path) == ["step-1", "step-3"]
    pruner.prune()
    assert folders(tmp_path) == ["step-3"]
    assert not [name for name in os.listdir(tmp_path) if "deleting" in name]


def test_a_save_that_fails_deletes_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=Last(1)) as manager:
        manager.save(1, state_of(1))
        with pytest.raises(hf.CheckpointError):
            manager.save(2, {"w": lambda: 1})
        manager.wait()
        assert manager.steps() == [1]
        (tmp_path / "step-3").write_text("in the way")
        assert manager.async_save(3, state_of(3)).exception() is not None
        assert manager.steps() == [1]
        manager.save(4, state_of(4))


def test_a_manager_for_reading_changes_nothing(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(1, state_of(1))
    damage_data(tmp_path / "step-1")
    before = sorted(map(str, tmp_path.rglob("*")))
    with CheckpointManager(tmp_path, keep=Last(1), when=EverySteps(1), read_only=True) as manager:
        assert not manager.should_save(1)
        with pytest.raises(ChecksumError):
            manager.restore(empty())
        for action in (lambda: manager.save(2, state_of(2)), manager.prune):
            with pytest.raises(UsageError, match="reading only"):
                action()
    assert sorted(map(str, tmp_path.rglob("*"))) == before


def test_an_evaluator_sees_each_step_once(tmp_path: Path) -> None:
    trainer, evaluator = CheckpointManager(tmp_path), CheckpointManager(tmp_path, read_only=True)
    trainer.save(1, state_of(1))
    trainer.save(2, state_of(2))
    seen = evaluator.new_steps(timeout=0.2, every=0.02)
    assert [next(seen), next(seen)] == [1, 2]
    trainer.save(3, state_of(3))
    assert list(seen) == [3]


def test_when_steps_are_saved(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, when=EverySteps(4) | Steps({6}) | First() | Last()) as manager:
        assert [step for step in range(1, 12) if manager.should_save(step, last=step == 11)] == [
            1,
            4,
            6,
            8,
            11,
        ]
        manager.save(12, state_of(12))
        assert not manager.should_save(12), "it was just saved"
    with CheckpointManager(tmp_path, when=First()) as manager:
        assert not manager.should_save(13)


@pytest.mark.slow
def test_saves_by_time(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "a", when=EverySeconds(1)) as manager:
        assert not manager.should_save(1)
        time.sleep(1.01)
        assert manager.should_save(2)
        manager.save(2, state_of(2))
        assert not manager.should_save(3)
    with CheckpointManager(tmp_path / "b", when=Continuous()) as manager:
        assert manager.should_save(1)
        future = manager.async_save(1, state_of(1))
        future.result()
        assert manager.should_save(2)


def test_a_signal_is_noticed_chained_and_handed_back(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        mine = signal.getsignal(signal.SIGUSR1)
        with CheckpointManager(tmp_path, when=Preempted((signal.SIGUSR1,))) as manager:
            assert not manager.should_save(1)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert manager.poll()
            assert manager.should_save(2)
            manager.save(2, state_of(2))
            assert manager.should_stop
        assert heard == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_forked_workers_ignore_a_signal_that_their_parent_got_too_and_can_be_terminated(
    tmp_path: Path,
) -> None:
    with CheckpointManager(tmp_path, when=Preempted((signal.SIGUSR2,))):
        for parent_too, expected in ((False, signal.SIGUSR2), (True, 0)):
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                os.write(writing, b"1")
                time.sleep(1 if parent_too else 20)
                os._exit(0)
            os.read(reading, 1)
            if parent_too:
                os.kill(os.getpid(), signal.SIGUSR2)
            os.kill(child, signal.SIGUSR2)
            assert os.waitpid(child, 0)[1] == expected


@pytest.mark.slow
def test_saves_in_a_process_with_staging_that_overlaps(tmp_path: Path) -> None:
    big: dict[str, Any] = {"w": torch.zeros(1 << 20), "n": 0}
    with CheckpointManager(
        tmp_path, overlap_staging=True, async_checkpointer_type=AsyncCheckpointerType.PROCESS
    ) as manager:
        manager.prewarm(big)
        for step in (1, 2):
            with manager.updating():
                big["w"].fill_(step)
            big["n"] = step
            manager.async_save(step, big, metrics={"loss": step})
    loaded: dict[str, Any] = {"w": torch.ones(1 << 20), "n": 0}
    restored = manager.restore(loaded)
    assert restored is not None
    assert (restored.step, restored.metrics, loaded["n"]) == (2, {"loss": 2.0}, 2)
    assert bool((loaded["w"] == 2).all())


@pytest.mark.parametrize("guarded", [True, False])
def test_only_the_guard_keeps_a_snapshot_that_overlaps_from_being_torn(
    tmp_path: Path, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The copy waits until the trainer comes to its update: the worst that may happen.
    arrived, real = threading.Event(), copy_spans

    def late(spans: Any, destination: int, *, threads: int) -> None:
        assert arrived.wait(20)
        if not guarded:
            time.sleep(0.2)
        real(spans, destination, threads=threads)

    monkeypatch.setattr(staging_copy, "copy_spans", late)
    state = {"a": torch.zeros(1 << 18), "b": torch.zeros(1 << 18)}
    with CheckpointManager(tmp_path, overlap_staging=True) as manager:
        manager.async_save(1, state)
        arrived.set()
        with manager.updating() if guarded else contextlib.nullcontext():
            for value in state.values():
                value.fill_(7)
    loaded = {"a": torch.ones(1 << 18), "b": torch.ones(1 << 18)}
    manager.restore(loaded)
    is_torn = any(bool((value == 7).any()) for value in loaded.values())
    assert is_torn is not guarded


def test_training_state_works_in_a_manager(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    training = hf.TrainingState(model=model, optimizer=optimizer)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"run": training})
        wanted = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.zero_()
        assert manager.restore({"run": training}) is not None
    assert torch.equal(model.weight, wanted)


@pytest.mark.slow
def test_a_thousand_steps_are_opened_at_once(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(0, state_of(0))
    for step in range(1, 1000):
        shutil.copytree(tmp_path / "step-0", tmp_path / f"step-{step}")
    began = time.process_time()
    manager = CheckpointManager(tmp_path, keep=Last(990))
    assert manager.latest() == 999
    assert time.process_time() - began < 0.5  # a look at a folder, not at its files
    assert manager.prune() == list(range(10))


PROGRAM = """
import sys, torch
from holdfast.manager import CheckpointManager, Last
manager = CheckpointManager(sys.argv[1], keep=Last(1))
for step in range(3):
    manager.async_save(step, {"w": torch.ones(10)})
"""


@pytest.mark.slow
def test_a_program_that_never_closes_its_manager_ends_well(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        check=False,
        env=python_environment(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert CheckpointManager(tmp_path).latest() == 2


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with CheckpointManager(tmp_path, name="checkpoint-{step}") as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step), metrics={"loss": 4.0 - step})
        manager.pin(1)
    root = str(tmp_path)
    assert main(["steps", root, "--metrics", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["steps"]
    assert [(step["step"], step["state"], step["metrics"]["loss"]) for step in found] == [
        (1, "complete", 3.0),
        (2, "complete", 2.0),
        (3, "complete", 1.0),
    ]
    assert main(["steps", root]) == 0
    assert "pinned" in capsys.readouterr().out
    assert main(["prune", root, "--last", "1", "--dry-run"]) == 0
    assert "would delete 1 step: 2; 2 stay" in capsys.readouterr().out
    assert main(["prune", root, "--best", "1", "--metric", "los"]) == 2
    message = "--metric: no step has the metric 'los'; the metrics are loss. Nothing was deleted"
    assert message in capsys.readouterr().err
    assert folders(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert main(["prune", root, "--steps", "10,20"]) == 2
    message = "--steps: there is no step 10, 20; the steps are 1, 2, 3. Nothing was deleted"
    assert message in capsys.readouterr().err
    assert folders(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert main(["prune", root, "--steps", "10", "--last", "3", "--dry-run"]) == 0
    assert "would delete 0 steps" in capsys.readouterr().out
    assert main(["prune", root, "--best", "1", "--metric", "loss", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["deleted"] == [2]
    assert folders(tmp_path) == ["checkpoint-1", "checkpoint-3"]
    assert main(["prune", root]) == 2
    assert main(["steps", str(tmp_path / "nothing")]) == 3
    capsys.readouterr()
    assert main(["steps", str(tmp_path / "checkpoint-1" / ".metadata")]) == 3
    assert "is a file, not the folder of a run" in capsys.readouterr().err
