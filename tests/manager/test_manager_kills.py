"""Kill -9 at the calls of a save that prunes: the newest step loads, and the next prune goes on."""

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.support.kills import run_and_kill
from tests.support.sweeps import sweep

import holdfast as hf
from holdfast.cli import main
from holdfast.manager import CheckpointManager, Last

pytestmark = pytest.mark.slow


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((300,), float(step))}


def save_into(folder: Path) -> None:
    hf.save(state_of(3), checkpoint_id=folder)


@sweep(stride=23)
def test_a_kill_at_any_call_of_save_and_prune_leaves_a_newest_step_that_loads(
    tmp_path: Path, stride: int
) -> None:
    original, root = tmp_path / "original", tmp_path / "run"
    with CheckpointManager(original) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))

    def save_and_prune() -> None:
        with CheckpointManager(root, keep=Last(1)) as victim:
            victim.save(4, state_of(4))

    kill_at, points = 1, list[str]()
    while True:
        shutil.copytree(original, root)
        point = run_and_kill(save_and_prune, kill_at)
        manager = CheckpointManager(root, keep=Last(1))
        latest = manager.latest()
        assert latest in ({4} if point is None else {3, 4}), point
        state = state_of(0)
        restored = manager.restore(state)
        assert restored is not None
        assert (restored.step, float(state["w"][0])) == (latest, latest), point
        cut_off = [4] if (root / "step-4").exists() and latest == 3 else []
        assert list(restored.skipped) == cut_off, point
        assert all("not complete" in reason for reason in restored.skipped.values()), point
        for step in manager.steps():
            hf.load(state, checkpoint_id=root / f"step-{step}")
        manager.save(5, state_of(5))
        manager.close()
        assert manager.steps() == [5], point
        left = set(os.listdir(root)) - {".holdfast-index.json", "step-5"}
        # A save that was killed before its commit is for `holdfast clean`, which knows it to be dead.
        assert left <= {"step-4"}, point
        shutil.rmtree(root)
        if point is None:
            break
        points.append(point)
        kill_at += stride
    assert len(points) > 100 // stride


def test_clean_removes_what_killed_saves_and_deletions_left_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(1))
        manager.save(2, state_of(2))
    for folder, kill_at in ((tmp_path / "step-3", 18), (tmp_path / "step-4", 26)):
        run_and_kill(partial(save_into, folder), kill_at)
        assert any(name.endswith(".lease") for name in os.listdir(folder))
    begun = tmp_path / "step-4" / ".metadata.0123.tmp"
    begun.write_bytes(b"")
    os.utime(begun, (1, 1))
    names = sorted(name for name in os.listdir(tmp_path / "step-1") if name != ".metadata")
    (tmp_path / ".holdfast-deleting-step-1").write_text(f'{{"files": ["{names[0]}"]}}')
    (tmp_path / "step-1" / ".metadata").unlink()
    assert main(["clean", str(tmp_path), "--dry-run"]) == 0
    assert "step-3: would remove" in capsys.readouterr().out
    assert (tmp_path / "step-3").exists()
    assert main(["clean", str(tmp_path)]) == 0
    assert sorted(os.listdir(tmp_path)) == ["step-2"]
    assert main(["clean", str(tmp_path), "--json"]) == 0
    assert '"removed": {}' in capsys.readouterr().out.splitlines()[-1]
    assert manager.steps() == [2]
