"""``holdfast cp`` makes a checked copy, in one step, and never harms what is there."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import python_environment
from tests.support.stock_torch import stock_save

import holdfast
from holdfast._io.local import LocalStore
from holdfast.cli import main


def save(folder: Path, value: float) -> None:
    holdfast.save({"x": torch.full((3 << 20,), value), "step": int(value)}, checkpoint_id=folder)


def load(folder: Path) -> float:
    state: dict[str, Any] = {"x": torch.zeros(3 << 20), "step": -1}
    holdfast.load(state, checkpoint_id=folder)
    (value,) = state["x"].unique().tolist()
    assert state["step"] == int(value)
    return float(value)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_copy_is_the_same_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "a", 1.0)
    assert main(["cp", str(tmp_path / "a"), str(tmp_path / "deep" / "b")]) == 0
    assert "1 data file, 12.0 MiB, all checked" in capsys.readouterr().out
    assert files(tmp_path / "deep" / "b") == files(tmp_path / "a")
    assert main(["cp", str(tmp_path / "a"), str(tmp_path / "deep" / "b"), "--json"]) == 0  # it is there
    assert json.loads(capsys.readouterr().out)["files"] == 1


def test_another_checkpoint_is_replaced_only_if_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "a", 1.0)
    save(tmp_path / "b", 2.0)
    assert main(["cp", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err
    assert load(tmp_path / "b") == 2.0
    assert main(["cp", str(tmp_path / "a"), str(tmp_path / "b"), "--overwrite", "-q"]) == 0
    assert capsys.readouterr().out == ""
    assert files(tmp_path / "b") == files(tmp_path / "a")
    assert load(tmp_path / "b") == 1.0


KILLED_SAVE = """
import os, signal, sys
import holdfast, torch

class Killed(holdfast.DefaultSavePlanner):
    def resolve_data(self, item):
        if item.index.fqn == "y":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(item)

writer = holdfast.FileSystemWriter(sys.argv[1], single_file_per_rank=False)
holdfast.save({"x": torch.ones(9), "y": torch.ones(5)}, storage_writer=writer, planner=Killed())
"""


@pytest.mark.slow
def test_what_a_killed_save_left_in_the_target_goes(tmp_path: Path) -> None:
    save(tmp_path / "a", 1.0)
    program = [sys.executable, "-c", KILLED_SAVE, str(tmp_path / "b")]
    ended = subprocess.run(program, check=False, env=python_environment())
    assert ended.returncode == -signal.SIGKILL
    assert any(name.endswith(".distcp") for name in os.listdir(tmp_path / "b"))
    assert main(["cp", str(tmp_path / "a"), str(tmp_path / "b"), "-q"]) == 0
    assert files(tmp_path / "b") == files(tmp_path / "a")


def test_a_damaged_source_is_not_copied_and_the_target_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "a", 1.0)
    save(tmp_path / "b", 2.0)
    before = files(tmp_path / "b")
    (data,) = (tmp_path / "a").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[5 << 20] ^= 1
    data.write_bytes(content)
    assert main(["cp", str(tmp_path / "a"), str(tmp_path / "b"), "--overwrite"]) == 1
    assert "the copy is not what was saved" in capsys.readouterr().err
    assert files(tmp_path / "b") == before
    assert main(["cp", str(tmp_path / "a"), str(tmp_path / "c")]) == 1
    assert os.listdir(tmp_path / "c") == []


def test_a_source_with_a_missing_file_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "a", 1.0)
    (data,) = (tmp_path / "a").glob("*.distcp")
    data.unlink()
    assert main(["cp", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert f"{tmp_path / 'a'}: {data.name} is missing" in capsys.readouterr().err
    assert os.listdir(tmp_path / "b") == []


def test_a_copy_that_fails_at_the_commit_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a", 1.0)
    save(tmp_path / "b", 2.0)
    before = files(tmp_path / "b")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalStore, "replace", fail)
    assert main(["cp", str(tmp_path / "a"), str(tmp_path / "b"), "--overwrite"]) == 3
    monkeypatch.undo()
    assert files(tmp_path / "b") == before
    assert load(tmp_path / "b") == 2.0


def test_checkpoints_of_torch_are_copied_and_not_over_files_of_the_same_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stock_save({"x": torch.ones(3)}, checkpoint_id=tmp_path / "a")
    stock_save({"x": torch.zeros(3)}, checkpoint_id=tmp_path / "b")
    before = files(tmp_path / "b")
    assert main(["cp", str(tmp_path / "a"), str(tmp_path / "b"), "--overwrite"]) == 2
    assert "Copy to another place" in capsys.readouterr().err
    assert files(tmp_path / "b") == before
    assert main(["cp", str(tmp_path / "a"), str(tmp_path / "c")]) == 0
    assert files(tmp_path / "c") == files(tmp_path / "a")


def test_parts_of_ranks_are_copied(tmp_path: Path) -> None:
    holdfast.save({"x": torch.ones(3)}, checkpoint_id=tmp_path / "a", use_collectives=False)
    assert main(["cp", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert files(tmp_path / "b") == files(tmp_path / "a")


def test_source_and_target_must_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "a", 1.0)
    assert main(["cp", str(tmp_path / "a"), str(tmp_path / "a")]) == 2
    assert "the same place" in capsys.readouterr().err


def test_a_copy_beside_the_steps_of_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    holdfast.save({"x": torch.ones(1)}, checkpoint_id=tmp_path / "run" / "step-1")
    run, step = str(tmp_path / "run"), str(tmp_path / "run" / "step-1")
    for words in (
        ["cp", step, run],
        ["cp", step, run, "--overwrite"],
        ["convert", step, run, "--to", "holdfast"],
    ):
        assert main(words) == 2
        said = f"{run}: has checkpoints in folders of it: step-1. Name a folder for the new one"
        assert said in capsys.readouterr().err
    assert os.listdir(run) == ["step-1"]
    assert main(["cp", step, f"{run}/step-2"]) == 0
