"""Ranks that do not call save or load while others do: they are named soon, and waited for."""

import datetime as dt
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Outcome, python_environment, rank_processes

import holdfast
from holdfast._ranks import roll_call
from holdfast.errors import RankLostError, UsageError

pytestmark = pytest.mark.slow

SAID = "not called {} yet: every rank of the process group must call it"


class Flag(logging.Handler):
    """A file that is made when something was logged, and that other ranks wait for."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    def emit(self, record: logging.LogRecord) -> None:
        with self.path.open("a") as file:
            file.write(record.getMessage() + "\n")

    def wait(self) -> str:
        while not self.path.exists() or not self.path.read_text():
            time.sleep(0.01)
        return self.path.read_text()


def new_group(folder: str, timeout: float, reminder: float = 0.3) -> tuple[Any, Flag]:
    roll_call.FIRST_REMINDER = reminder
    flag = Flag(f"{folder}/log")
    logging.getLogger("holdfast").addHandler(flag)
    return dist.new_group(timeout=dt.timedelta(seconds=timeout)), flag


def save(group: Any, folder: str, value: float = 1.0) -> None:
    holdfast.save({"a": torch.full((2,), value)}, checkpoint_id=f"{folder}/c", process_group=group)


def loaded(group: Any, folder: str) -> float:
    state = {"a": torch.zeros(2)}
    holdfast.load(state, checkpoint_id=f"{folder}/c", process_group=group)
    return state["a"][0].item()


def save_on_rank_0_only(folder: str) -> tuple[str, float]:
    group, _ = new_group(folder, timeout=3)
    told = ""
    if dist.get_rank() == 0:
        try:
            save(group, folder)
        except UsageError as error:
            told = str(error)
        Path(folder, "over").touch()
    while not Path(folder, "over").exists():
        time.sleep(0.01)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)  # nothing of the save stands in its way
    return told, total.item()


def save_while_others_end(folder: str, end: str, has_called: bool) -> tuple[str, float]:
    """Rank 0 saves in a group whose timeout is far away; the others end, one way or another."""
    group = dist.new_group(timeout=dt.timedelta(hours=1))
    if has_called:
        save(group, folder)
    if dist.get_rank() == 0:
        Path(folder, "begun").touch()
        began = time.monotonic()
        try:
            save(group, folder)
        except RankLostError as error:
            return str(error), time.monotonic() - began
        finally:
            Path(folder, "over").touch()
    # Whoever ends before rank 0 has made the group makes that fail.
    while not Path(folder, "begun").exists():
        time.sleep(0.01)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif end == "leave":
        dist.destroy_process_group(group)
        del group
        while not Path(folder, "over").exists():
            time.sleep(0.01)
    return "", 0.0


def come_late(folder: str, call: str, late: list[int], channel: str) -> float:
    """Ranks that call only when the others have complained."""
    group, flag = new_group(folder, timeout=60)
    if channel == "later" or call == "load":
        roll_call.FIRST_REMINDER = 60.0
        save(group, folder)
        roll_call.FIRST_REMINDER = 0.3
        dist.barrier()
    if channel == "first" and call == "load":
        group = dist.new_group(timeout=dt.timedelta(seconds=60))
    if dist.get_rank() in late:
        flag.wait()
    if call == "save":
        save(group, folder, 2.0)
    return loaded(group, folder)


def never_call_later(folder: str) -> tuple[str, float]:
    group, _ = new_group(folder, timeout=3)
    save(group, folder)
    if dist.get_rank() == 0:
        while not Path(folder, "over").exists():
            time.sleep(0.01)
    told = ""
    try:
        save(group, folder, 2.0)
    except UsageError as error:
        told = str(error)
    Path(folder, "over").touch()
    save(group, folder, 3.0)
    return told, loaded(group, folder)


class SlowState:
    """Busy in its ``state_dict`` for longer than the first reminder."""

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            time.sleep(2)
        return {"a": torch.ones(1)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def be_busy_after_calling(folder: str) -> bool:
    group, flag = new_group(folder, timeout=60)
    holdfast.save({"slow": SlowState()}, checkpoint_id=f"{folder}/c", process_group=group)
    return flag.path.exists()


def run(function: Any, world_size: int, *args: Any) -> list[Any]:
    outcomes: list[Outcome] = rank_processes().run(function, world_size, *args, timeout=60)
    assert [outcome.kind for outcome in outcomes] == ["returned"] * world_size, outcomes
    return [outcome.value for outcome in outcomes]


def test_a_save_by_rank_0_alone_names_the_others_and_raises_after_the_timeout(tmp_path: Path) -> None:
    (told, total), *others = run(save_on_rank_0_only, 4, str(tmp_path))
    assert "ranks 1-3 have " + SAID.format("save") in told
    assert len(told.splitlines()) == 2, "a headline, and the reason once for all ranks"
    assert total == 4
    assert others == [("", 4)] * 3
    log = (tmp_path / "log").read_text()
    assert log.startswith("ranks 1-3 have " + SAID.format("save"))
    assert 2 <= len(log.splitlines()) <= 4, "it is repeated, ever more seldom"


@pytest.mark.parametrize(
    ("end", "has_called"), [("return", False), ("kill", False), ("leave", False), ("return", True)]
)
def test_a_save_by_rank_0_alone_raises_soon_if_the_others_have_ended(
    tmp_path: Path, end: str, has_called: bool
) -> None:
    first, *_ = rank_processes().run(save_while_others_end, 3, str(tmp_path), end, has_called, timeout=60)
    told, seconds = first.value
    assert seconds < 8
    if has_called:
        assert "is lost: its process ended before it sent anything for this save: every rank" in told
    else:
        said = "ranks 1-2 have ended, or left the process group, without calling save: every rank"
        assert said in told
        assert len(told.splitlines()) == 2


_BESIDE_TORCHRUN = """
import time, torch, torch.distributed as dist, holdfast
from holdfast._ranks import departures
departures._has_left_gloo = lambda group, rank: False  # as with NCCL, which needs a GPU
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    holdfast.save({"a": torch.ones(1)}, checkpoint_id="never")
"""


def test_ranks_that_torchrun_has_started_here_are_seen_to_end_with_any_backend(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_BESIDE_TORCHRUN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    ended = subprocess.run(
        [*torchrun, "program.py"],
        cwd=tmp_path,
        env=python_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "RankLostError: ranks 1-2 have ended, or left the process group, without calling" in ended.stderr
    assert ended.returncode == 1


@pytest.mark.parametrize(
    ("call", "late", "channel"),
    [
        ("save", [1, 2], "first"),
        ("save", [0], "later"),
        ("load", [0, 2], "first"),
        ("load", [1], "later"),
    ],
)
def test_ranks_that_come_late_are_named_and_waited_for(
    tmp_path: Path, call: str, late: list[int], channel: str
) -> None:
    assert run(come_late, 3, str(tmp_path), call, late, channel) == [2.0 if call == "save" else 1.0] * 3
    log = (tmp_path / "log").read_text().splitlines()
    names = {(1, 2): "ranks 1-2 have", (0,): "rank 0 has", (1,): "rank 1 has", (0, 2): "ranks 0, 2 have"}
    assert log[0].startswith(f"{names[tuple(late)]} {SAID.format(call)}")


def test_a_later_save_without_some_rank_raises_on_all_after_the_timeout(tmp_path: Path) -> None:
    for told, value in run(never_call_later, 3, str(tmp_path)):
        assert "rank 0 has " + SAID.format("save") in told
        assert value == 3.0


def test_a_rank_that_is_busy_in_its_part_has_called(tmp_path: Path) -> None:
    assert run(be_busy_after_calling, 2, str(tmp_path)) == [False] * 2
