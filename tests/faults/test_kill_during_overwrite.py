"""A save killed before or after any call that changes the file system: all old or all new (B1, B2)."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.checkpoints import committed_files, contents, load, put_back
from tests.support.kills import run_and_kill
from tests.support.states import large_state, same, small_state
from tests.support.sweeps import sweep

import holdfast as hf
from holdfast.extension import ZStandard

pytestmark = pytest.mark.one_core

LAYOUTS: dict[str, dict[str, Any]] = {
    "one thread": {},
    "three threads": {"thread_count": 3},
    "a file per item": {"single_file_per_rank": False, "thread_count": 2},
    "zstd": {"zstd": True},
    "past the page cache": {"state": "large"},
}


class Kill(NamedTuple):
    """One kill: at which call, which checkpoint was there after it, and what the next save left lying."""

    point: str
    found: str
    stale: list[str]


def test_a_kill_at_some_calls_leaves_the_old_checkpoint_or_the_new(tmp_path: Path) -> None:
    kills = _run_kills(tmp_path, "three threads", stride=7)
    assert {kill.found for kill in kills} == {"old", "new"}
    assert kills[0].found == "old"


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["one thread", *(pytest.param(name, marks=pytest.mark.soak) for name in list(LAYOUTS)[1:])]
)
def test_a_kill_at_any_call_leaves_the_old_checkpoint_or_the_new(tmp_path: Path, layout: str) -> None:
    """The save after it works, and removes whatever the killed one left."""
    kills = _run_kills(tmp_path, layout)
    points = [kill.point for kill in kills]
    # The rename of the metadata, which comes after that of the lease, is the only step that changes which
    # checkpoint is there.
    assert points.count("after rename") == 2
    commit = len(points) - 1 - points[::-1].index("after rename")
    assert [kill.found for kill in kills] == ["old"] * commit + ["new"] * (len(kills) - commit)
    assert {"before open", "after pwritev", "before fsync", "after fsync", "before rename"} <= set(points)
    assert {"before unlink", "after unlink"} <= set(points[commit:])
    assert [kill for kill in kills if kill.stale] == [], "the save after a kill left stale files"


@sweep(stride=3)
@pytest.mark.slow
def test_what_a_first_save_left_goes_though_the_next_one_is_killed_as_well(
    tmp_path: Path, stride: int
) -> None:
    """Nothing was ever committed: only the leases tell that these files are of killed saves."""
    kills = _run_kills(tmp_path, KILLED_BEFORE, stride)
    assert {kill.found for kill in kills} == {"none", "new"}
    assert [kill for kill in kills if kill.stale] == [], "the save after two kills left stale files"


@sweep(stride=6)
@pytest.mark.slow
def test_kills_at_random_instants_leave_the_old_checkpoint_or_the_new(tmp_path: Path, stride: int) -> None:
    kills = _run_kills(tmp_path, RANDOM, stride)
    assert {kill.found for kill in kills} <= {"old", "new"}
    assert len(kills) == RANDOM_KILLS // stride


def _run_kills(folder: Path, layout: str, stride: int = 1) -> list[Kill]:
    """All kills of one layout, by a process that forks a victim for each of them."""
    program = ["-m", "tests.faults.test_kill_during_overwrite"]
    command = [sys.executable, *program, str(folder / "checkpoint"), layout, str(stride)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    return [Kill(*kill) for kill in json.loads(done.stdout)]


# What follows runs in the process that is started for it.

KILLED_BEFORE = "a killed first save"
RANDOM = "random instants"
RANDOM_KILLS = 150


def _victim_of_the_clock(work: Callable[[], None], number: int) -> str | None:
    """Run ``work`` in a fork that a timer kills: after more of it each time, from nothing to most of it."""
    child = os.fork()
    if child == 0:
        # Without a handler this signal ends the process at once, wherever it is.
        signal.setitimer(signal.ITIMER_REAL, 1e-5 + number * 1e-4)
        work()
        os._exit(0)
    os.waitpid(child, 0)
    return None if number >= RANDOM_KILLS else f"after {number} ticks"


def _main(folder: str, layout: str, stride: int) -> None:
    torch.set_num_threads(1)
    options = dict(LAYOUTS.get(layout, {}))
    make = large_state if options.pop("state", "") == "large" else small_state
    extensions = [ZStandard()] if options.pop("zstd", False) else None
    old, new, later = (make(seed) for seed in (1, 2, 3))

    def save(state: dict[str, Any]) -> None:
        hf.save(state, storage_writer=hf.FileSystemWriter(folder, _extensions=extensions, **options))

    if layout == KILLED_BEFORE:
        assert next(point for n in itertools.count(20) if (point := run_and_kill(lambda: save(old), n)))
        assert any(name.endswith(".distcp") for name in os.listdir(folder))
    else:
        save(old)
    before = contents(folder)
    kills: list[Kill] = []
    victim = _victim_of_the_clock if layout == RANDOM else run_and_kill
    for n in itertools.count(0 if layout == RANDOM else 1, stride):
        put_back(folder, before)
        point = victim(lambda: save(new), n)
        if point is None:
            break
        found = load(folder, make(99)) if os.path.exists(f"{folder}/.metadata") else None
        which = "old" if same(found, old) else "new" if same(found, new) else "a mix" if found else "none"
        save(later)
        assert same(load(folder, make(99)), later), f"the save after a kill {point} is not whole"
        kills.append(Kill(point, which, sorted(set(os.listdir(folder)) - committed_files(folder))))
    sys.stdout.write(json.dumps(kills))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
