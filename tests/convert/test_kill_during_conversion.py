"""A conversion over an older target, killed at any call: the old one or the new one, whole."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support.kills import run_and_kill

import holdfast

pytestmark = pytest.mark.one_core


@pytest.mark.slow
def test_a_kill_leaves_the_old_file_or_the_new(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.convert.test_kill_during_conversion", str(tmp_path)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    kills = json.loads(done.stdout)
    found = [value for _, value in kills]
    # Once new, always new.
    assert found == sorted(found)
    assert set(found) == {1.0, 2.0}
    assert {"before rename", "after rename"} <= {point for point, _ in kills}


# What follows runs in the process that is started for it.


def _main(folder: Path) -> None:
    torch.set_num_threads(1)
    target = folder / "target" / "model.pt"
    target.parent.mkdir()
    for number in (1.0, 2.0):
        torch.save({"x": torch.full((300_000,), number), "n": number}, folder / f"{number}.pt")
    kills: list[tuple[str, float]] = []

    def overwrite() -> None:
        holdfast.convert(folder / "2.0.pt", target, overwrite=True)

    for at in itertools.count(1):
        holdfast.convert(folder / "1.0.pt", target, overwrite=True)
        there = os.listdir(target.parent)
        assert there == ["model.pt"], f"the conversion after a kill {kills[-1:]} left {there}"
        point = run_and_kill(overwrite, at)
        if point is None:
            break
        found = torch.load(target)
        assert found["x"].unique().tolist() == [found["n"]]
        kills.append((point, found["n"]))
    sys.stdout.write(json.dumps(kills))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
