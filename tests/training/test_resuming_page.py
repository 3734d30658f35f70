"""The page "Resuming a run", as a newcomer follows it: 4 ranks, killed, then 2."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import ROOT, python_environment

import holdfast

pytestmark = pytest.mark.slow


def start(folder: Path, ranks: int, steps: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [*command, "train.py", "--steps", str(steps)],
        cwd=folder,
        env={**python_environment(), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_newcomer_resumes_on_two_ranks_what_four_ranks_began(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "resuming.md").read_text()
    script = re.search(r"`train.py`:\n\n```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert script is not None
    (tmp_path / "train.py").write_text(script[1])

    first = start(tmp_path, 4, 10**6)
    assert first.stdout is not None
    for line in first.stdout:
        if "step 25 " in line:
            break
    # Ranks have sessions of their own, and outlive torchrun.
    threads = Path(f"/proc/{first.pid}/task").glob("*/children")
    ranks = [pid for children in threads for pid in children.read_text().split()]
    assert len(ranks) == 4
    for pid in [first.pid, *map(int, ranks)]:
        os.kill(pid, signal.SIGKILL)
    first.communicate()
    saved: dict[str, Any] = {"training": {"step": 0}}
    holdfast.load(saved, checkpoint_id=tmp_path / "checkpoints" / "last", strict=False)
    done = saved["training"]["step"]
    assert done >= 20

    second = start(tmp_path, 2, done + 12)
    printed, _ = second.communicate()
    assert second.returncode == 0, printed
    steps = [int(number) for number in re.findall(r"^step (\d+) ", printed, re.MULTILINE)]
    assert steps == list(range(done + 1, done + 13))


def test_the_loop_with_a_manager_goes_on_where_it_stopped(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "resuming.md").read_text()
    loop = re.search(r"```python\n(from holdfast.manager .*?)^```", page, re.MULTILINE | re.DOTALL)
    assert loop is not None
    names: dict[str, Any] = {}
    exec(loop[1], names)
    for steps, trained in ((25, 25), (45, 25)):
        state = holdfast.TrainingState(torch.nn.Linear(2, 2))
        calls: list[int] = []
        names["train_with_manager"](state, steps, tmp_path, lambda to=calls: to.append(1))
        assert (state.step, len(calls)) == (steps, trained)
    with holdfast.CheckpointManager(tmp_path, read_only=True) as manager:
        assert manager.steps() == [20, 30, 40]
