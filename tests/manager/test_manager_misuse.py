"""A manager that is used in unusual ways: nothing is lost, and the error says why."""

import dataclasses
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.checkpoints import data_file, read_manifest, write_manifest
from tests.support.tools import as_nobody

import holdfast as hf
from holdfast._manager.background_pruning import _close_all
from holdfast.errors import (
    MetadataFormatError,
    NewerFormatError,
    StorageError,
    TruncatedFileError,
    UnsafeMetadataError,
    UsageError,
    WrongFolderError,
)
from holdfast.manager import Best, CheckpointManager, EverySteps, Last, Preempted


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((10,), float(step)), "n": step}


@dataclasses.dataclass
class Config:
    size: int


def test_a_class_that_is_not_allowed_is_no_damage(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"config": Config(step)})
    state = {"config": Config(0)}
    with pytest.raises(UnsafeMetadataError, match="safe_globals"):
        CheckpointManager(tmp_path).restore(state)
    restored = CheckpointManager(tmp_path).restore(state, safe_globals=[Config])
    assert restored is not None
    assert (restored.step, state["config"].size) == (2, 2)


def test_a_step_of_a_newer_version_is_neither_damaged_nor_passed_over(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(1))
        manager.save(2, state_of(2))
    manifest = read_manifest(tmp_path / "step-2")
    manifest.version = (2, 0)
    write_manifest(tmp_path / "step-2", manifest)
    for _ in range(2):
        with pytest.raises(NewerFormatError, match="Update holdfast"):
            manager.restore(state_of(0))
    assert manager.steps() == [1, 2]


def test_a_root_that_is_a_checkpoint_is_never_taken_for_a_first_start(tmp_path: Path) -> None:
    hf.save(state_of(1), checkpoint_id=tmp_path / "7")
    for read_only in (False, True):
        with pytest.raises(WrongFolderError, match=r"7 is a checkpoint, not the folder of a run"):
            CheckpointManager(tmp_path / "7", read_only=read_only)


def test_steps_under_other_names_are_never_taken_for_a_first_start(tmp_path: Path) -> None:
    hf.save(state_of(3), checkpoint_id=tmp_path / "3")
    with pytest.raises(
        WrongFolderError, match=r"the checkpoints 3\. Pass name='\{step\}' to go on from them"
    ):
        CheckpointManager(tmp_path).restore(state_of(0))
    restored = CheckpointManager(tmp_path, name="{step}").restore(state_of(0))
    assert restored is not None
    assert restored.step == 3


def test_steps_under_other_names_are_found_beside_other_checkpoints(tmp_path: Path) -> None:
    for folder in ("100", "200", "last", "pretrained"):
        hf.save(state_of(3), checkpoint_id=tmp_path / folder)
    with pytest.raises(WrongFolderError, match=r"the checkpoints 100, 200\. Pass name='\{step\}'"):
        CheckpointManager(tmp_path).restore(state_of(0))


def test_a_metric_that_no_step_has_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(tmp_path, keep=Last(1) | Best(1, "los")) as manager:
        for step in range(4):
            manager.save(step, state_of(step), metrics={"loss": float(step)})
            manager.prune()
        [said] = [line for line in caplog.messages if "los" in line]
        assert "no step has the metric 'los'; the metrics are loss" in said
        assert manager.steps() == [3]
        caplog.clear()
        assert manager.best("loss") == 3
        assert not caplog.messages
        assert manager.best("accuracy") is None
        assert "no step has the metric 'accuracy'; the metrics are loss" in caplog.text


def test_other_checkpoints_beside_a_run_do_not_stop_its_first_start(tmp_path: Path) -> None:
    hf.save(state_of(1), checkpoint_id=tmp_path / "pretrained")
    assert CheckpointManager(tmp_path).restore(state_of(0)) is None


def test_a_run_of_which_all_steps_are_damaged_is_never_taken_for_a_first_start(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(1))
        data = data_file(tmp_path / "step-1")
        whole = data.read_bytes()
        data.write_bytes(whole[:100])
    for _ in range(2):
        with pytest.raises(TruncatedFileError):
            CheckpointManager(tmp_path).restore(state_of(0))
    data.write_bytes(whole)
    restored = CheckpointManager(tmp_path).restore(state_of(0))
    assert restored is not None
    assert manager.steps() == [1]


@pytest.mark.parametrize(
    "form", ["{step:x}", "{step:o}", "{step:,}", "{step:_}", "{step:g}", "{step:c}", "\0{step}"]
)
def test_a_name_from_which_the_step_cannot_be_found_again_is_refused(tmp_path: Path, form: str) -> None:
    with pytest.raises(UsageError, match="name="):
        CheckpointManager(tmp_path, name=form)


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (torch.tensor(7), r"tensor\(7\): pass step\.item\(\)"),
        (np.int64(7), r"pass step\.item\(\)"),
        (state_of(7), r"not a dict. The order is save\(step, state\) and restore\(state, step\)"),
        (7.0, r"not 7\.0$"),
        ("7", "not '7'$"),
        (True, "not True$"),
        (-1, "not -1$"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_step_that_is_no_number_is_answered_with_what_to_pass(tmp_path: Path, step: Any, says: str) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(7, state_of(7))
        for call in (
            lambda: manager.save(step, 8),
            lambda: manager.async_save(step, 8),
            lambda: manager.should_save(step),
            lambda: manager.restore(8, step),
            lambda: manager.pin(step),
            lambda: manager.path(step),
            lambda: manager.metrics(step),
        ):
            with pytest.raises(UsageError, match=f"a step is a whole number of 0 or more.*{says}"):
                call()
        assert manager.steps() == [7]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"metrics": 3}, "metrics must be a dict"),
        ({"metadata": 3}, "metadata must be a dict"),
        ({"metadata": {"a": torch.ones(2)}}, "plain values"),
        ({"checkpoint_id": "elsewhere"}, "checkpoint_id: the manager decides this"),
        ({"no_dist": True}, "no_dist: the manager decides this"),
    ],
    ids=str,
)
def test_what_cannot_be_kept_with_a_step_is_refused(tmp_path: Path, words: dict[str, Any], says: str) -> None:
    with CheckpointManager(tmp_path) as manager:
        for save in (manager.save, manager.async_save):
            with pytest.raises(UsageError, match=says):
                save(1, state_of(1), **words)
        manager.save(2, state_of(2))
    assert manager.steps() == [2]


@pytest.mark.parametrize("metadata", [3, {"a": torch.ones(2)}], ids=str)
def test_metadata_of_a_run_that_json_cannot_hold_is_refused(tmp_path: Path, metadata: Any) -> None:
    with pytest.raises(UsageError, match="metadata"):
        CheckpointManager(tmp_path / "run", metadata=metadata)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", ["high", None, torch.ones(3), 10**400])
def test_a_metric_that_is_no_number_is_refused_before_anything_is_changed(tmp_path: Path, value: Any) -> None:
    with CheckpointManager(tmp_path, keep=Last(1), when=EverySteps(1)) as manager:
        manager.save(2, state_of(2))
        for step in (1, 3):
            with pytest.raises(UsageError, match="'loss' is not a number"):
                manager.save(step, state_of(step), metrics={"loss": value})
        assert manager.should_save(3)
        manager.save(3, state_of(3))
        manager.save(4, state_of(4))
    assert manager.steps() == [4]


def test_a_manager_for_reading_pins_nothing(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(1, state_of(1))
    evaluator = CheckpointManager(tmp_path, read_only=True)
    for change in (evaluator.pin, evaluator.unpin):
        with pytest.raises(UsageError, match="for reading only"):
            change(1)
    assert os.listdir(tmp_path) == ["step-1"]


def test_a_step_that_is_a_link_is_not_deleted(tmp_path: Path) -> None:
    hf.save(state_of(1), checkpoint_id=tmp_path / "elsewhere")
    before = sorted(os.listdir(tmp_path / "elsewhere"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/step-1").symlink_to(tmp_path / "elsewhere")
    with CheckpointManager(tmp_path / "run", keep=Last(1)) as manager:
        manager.save(2, state_of(2))
        manager.save(3, state_of(3))
    assert manager.steps() == [1, 3]
    assert sorted(os.listdir(tmp_path / "elsewhere")) == before


def test_a_reader_whose_step_is_deleted_under_it_takes_the_newer_one(tmp_path: Path) -> None:
    trainer = CheckpointManager(tmp_path, keep=Last(1))
    trainer.save(1, {"part": state_of(1)})

    class Part:
        """Whoever asks for its state lets the trainer go on."""

        def __init__(self) -> None:
            self.values = state_of(0)

        def state_dict(self) -> dict[str, Any]:
            if trainer.latest() == 1:
                trainer.save(2, {"part": state_of(2)})
                trainer.wait()
            return self.values

        def load_state_dict(self, values: dict[str, Any]) -> None:
            self.values = values

    part = Part()
    restored = CheckpointManager(tmp_path, read_only=True).restore({"part": part})
    trainer.close()
    assert trainer.steps() == [2]
    assert restored is not None
    assert (restored.step, dict(restored.skipped), part.values["n"]) == (2, {}, 2)


def test_a_reader_does_not_call_a_running_save_damaged(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(1))
    (tmp_path / "step-2").mkdir()
    restored = CheckpointManager(tmp_path, read_only=True).restore(state_of(0))
    assert restored is not None
    assert (restored.step, dict(restored.skipped)) == (1, {})


def test_a_failure_that_its_future_has_told_is_not_raised_again_at_the_end(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    (tmp_path / "step-1").write_text("in the way")
    with pytest.raises(hf.CheckpointException):
        manager.async_save(1, state_of(1)).result()
    manager.close()
    manager = CheckpointManager(tmp_path)
    manager.async_save(1, state_of(1))
    with pytest.raises(hf.CheckpointException):
        manager.close()


def test_what_ended_the_training_is_not_hidden_by_a_failed_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> None:
        with CheckpointManager(tmp_path) as manager:
            manager.async_save(1, state_of(1))
            raise KeyError("training")

    (tmp_path / "step-1").write_text("in the way")
    with pytest.raises(KeyError, match="training"):
        train()
    assert "the last save failed, too: " in caplog.text


def test_a_save_that_was_cancelled_does_not_make_the_end_fail(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        future = manager.async_save(1, {"w": torch.zeros(1 << 22)})
        was_cancelled = future.cancel()
    assert manager.steps() == ([] if was_cancelled else [1])


def test_a_step_that_another_step_is_a_link_to_is_not_deleted(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, state_of(1))
        manager.save(2, state_of(2))
    (tmp_path / "run/step-9").symlink_to("step-2")
    with CheckpointManager(tmp_path / "run", keep=Last(1)) as manager:
        assert manager.prune() == [1]
        state = state_of(0)
        restored = manager.restore(state)
        assert restored is not None
        assert (restored.step, state["n"]) == (9, 2)


def test_a_first_start_beside_a_step_that_is_not_complete_does_not_pass_unnoticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hf.save(state_of(7), checkpoint_id=tmp_path / "step-7")
    (tmp_path / "step-7" / ".metadata").unlink()
    assert CheckpointManager(tmp_path).restore(state_of(0)) is None
    assert "step 7 is not tried: it is not complete: step-7 has no .metadata" in caplog.text


def test_a_run_that_goes_back_leaves_a_save_behind_that_is_still_running(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=Last(1)) as manager:
        manager.save(10, state_of(10))
        manager.async_save(30, {"w": torch.zeros(4 << 20), "n": 30})
        manager.save(20, state_of(20))
        assert manager.latest() == 20
    assert CheckpointManager(tmp_path).steps() == [20]


def test_a_run_that_cannot_note_that_it_goes_back_saves_nothing_and_deletes_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=Last(1)) as manager:
        manager.save(30, state_of(30))
        (tmp_path / ".holdfast-abandoned.json").mkdir()
        with pytest.raises(StorageError, match=r"from step 30 to step 20.*could not be noted"):
            manager.save(20, state_of(20))
        failed = manager.async_save(21, state_of(21), check_replicas="full").exception()
        assert isinstance(failed, StorageError)
        manager.wait()
        assert manager.steps() == [30]
        (tmp_path / ".holdfast-abandoned.json").rmdir()
        manager.save(20, state_of(20))
    assert CheckpointManager(tmp_path).steps() == [20]


def test_a_manager_does_not_delete_what_it_saved_last_if_another_one_saves_higher_steps(
    tmp_path: Path,
) -> None:
    with CheckpointManager(tmp_path, keep=Last(1)) as one, CheckpointManager(tmp_path, keep=Last(1)) as other:
        one.save(20, state_of(20))
        one.wait()
        other.save(30, state_of(30))
        other.wait()
        one.save(25, state_of(25))
        one.wait()
        assert one.steps() == [25, 30]


def test_a_forked_child_that_ends_does_not_wait_for_the_deletions_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, goes_on = CheckpointManager(tmp_path, keep=Last(1)), threading.Event()
    manager.save(1, state_of(1))
    plan = manager._pruning.plan
    monkeypatch.setattr(manager._pruning, "plan", lambda: goes_on.wait() and plan())
    manager.save(2, state_of(2))
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _close_all()  # as sys.exit does
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert time.monotonic() - began < 4
    goes_on.set()
    manager.close()
    assert manager.steps() == [2]


def test_nothing_is_deleted_while_nobody_knows_which_step_is_the_newest(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (10, 20, 30, 11):
            manager.save(step, state_of(step))
    (tmp_path / ".holdfast-abandoned.json").write_bytes(b'{"steps": {"step-2')
    for act in (manager.latest, manager.prune):
        with pytest.raises(MetadataFormatError, match="went back"):
            act()
    with pytest.raises(MetadataFormatError, match="Delete it if"):
        CheckpointManager(tmp_path, keep=Last(1))
    assert {"step-10", "step-11", "step-20", "step-30"} <= set(os.listdir(tmp_path))


def test_a_signal_that_is_named_twice_is_noticed_once(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    twice = Preempted((signal.SIGUSR1, signal.SIGUSR1)) | Preempted((signal.SIGUSR1,))
    with CheckpointManager(tmp_path, when=twice) as manager:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert manager.should_save(1)
        assert manager.should_stop
    assert signal.getsignal(signal.SIGUSR1) == before


def _in_a_thread(close: Callable[[], None]) -> None:
    thread = threading.Thread(target=close)
    thread.start()
    thread.join()


@pytest.mark.parametrize("call", [lambda close: close(), _in_a_thread], ids=["main thread", "other thread"])
def test_signals_reach_the_program_again_in_whatever_order_managers_are_closed(
    tmp_path: Path, call: Callable[[Callable[[], None]], None]
) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        first = CheckpointManager(tmp_path / "a", when=Preempted((signal.SIGUSR1,)))
        second = CheckpointManager(tmp_path / "b", when=Preempted((signal.SIGUSR1,)))
        call(first.close)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert second.should_save(1)
        call(second.close)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1, signal.SIGUSR1]
        assert "holdfast" not in str(getattr(signal.getsignal(signal.SIGUSR1), "__module__", ""))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_step_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    state = {"w": torch.zeros(3)}
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(hf.errors.CheckpointNotFoundError, match="no step 5; there is none"):
            manager.restore(state, 5)
        for step in (10, 20):
            manager.save(step, state)
        with pytest.raises(hf.errors.CheckpointNotFoundError, match=r"no step 5; there are 20, 10$"):
            manager.restore(state, 5)


def test_a_newest_step_that_may_not_be_looked_into_is_raised_and_not_stepped_over() -> None:
    parent = Path(tempfile.mkdtemp())
    try:
        parent.chmod(0o755)
        for step in (1, 2):
            hf.save({"w": torch.full((3,), float(step))}, checkpoint_id=parent / "run" / f"step-{step}")
        (parent / "lost+found").mkdir(mode=0o700)
        state = {"w": torch.zeros(3)}
        CheckpointManager(parent / "run").restore(state)  # what is imported late is imported as root
        (parent / "run" / "step-2").chmod(0)
        with as_nobody(), CheckpointManager(parent / "run", read_only=True) as manager:
            with pytest.raises(PermissionError, match="step-2"):
                manager.restore(state)
            assert manager.restore(state, 1) is not None
        (parent / "run" / "step-2").chmod(0o755)
        (parent / "run" / "step-1").chmod(0)
        with as_nobody(), CheckpointManager(parent / "run", read_only=True) as manager:
            restored = manager.restore(state)
        assert restored is not None
        assert restored.step == 2
    finally:
        shutil.rmtree(parent)
