"""The page "Resuming a run", as a newcomer follows it: 4 ranks, killed, then 2."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.ranks import ROOT, python_environment

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
        start_new_session=True,
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
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()

    second = start(tmp_path, 2, 40)
    printed, _ = second.communicate()
    assert second.returncode == 0, printed
    steps = [int(number) for number in re.findall(r"^step (\d+) ", printed, re.MULTILINE)]
    # The job may have come further than the line that was read.
    assert steps[0] > 20
    assert steps[0] % 10 == 1
    assert steps == list(range(steps[0], 41))
