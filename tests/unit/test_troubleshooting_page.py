"""Every message that docs/troubleshooting.md quotes is one that users see."""

import os
import pickle
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.checkpoints import data_file, flip_bit
from tests.support.ranks import ROOT, rank_processes

import holdfast
from holdfast.errors import CheckpointError
from holdfast.testing import FakeRank, FakeRanks

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTES = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LOST = "RankLostError"


def as_pattern(quote: str) -> "re.Pattern[str]":
    words = [re.escape(word) for word in quote.strip().split("...")]
    return re.compile(".+?".join(words), re.DOTALL)


class Custom:
    """A class of the user's own."""


class RunsCode:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def state() -> dict[str, Any]:
    return {"model": {"weight": torch.ones(600, 1000), "bias": torch.zeros(3)}, "step": 5}


def load(place: Path | str, wanted: dict[str, Any], **options: Any) -> None:
    holdfast.load(wanted, checkpoint_id=place, **options)


def changed(folder: Path, change: Callable[[Path], object]) -> None:
    """A load from a copy that something happened to."""
    copy = folder.with_name("changed")
    shutil.copytree(folder, copy)
    change(copy)
    load(copy, state())


def save_different(rank: FakeRank) -> None:
    rank.save({"w": torch.full((30_000,), float(rank.rank))}, checkpoint_id="different")


class FullDisk(holdfast.FileSystemWriter):
    def write_data(self, plan: holdfast.SavePlan, planner: holdfast.SavePlanner) -> Any:
        if self.rank == 1:
            raise OSError(28, "No space left on device")
        return super().write_data(plan, planner)


def unsafe_metadata() -> None:
    Path("unsafe").mkdir()
    Path("unsafe/.metadata").write_bytes(pickle.dumps(RunsCode()))
    load("unsafe", {"a": 1})


def custom_object() -> None:
    holdfast.save({"a": Custom()}, checkpoint_id="custom")
    load("custom", {"a": None})


def one_file() -> None:
    Path("file").write_text("x")
    holdfast.save({"a": 1}, checkpoint_id="file")


def below(folder: Path) -> None:
    shutil.copytree(folder, "run/step-5")
    load("run", state())


MISTAKES: list[Callable[[Path], object]] = [
    lambda ok: load("nowhere", state()),
    below,
    lambda ok: changed(ok, lambda copy: (copy / ".metadata").unlink()),
    lambda ok: load(ok, {"model": state()["model"], "steps": 0}, strict=False),
    lambda ok: load(ok, {"step": 0, "model": {"weight": torch.ones(600, 1000)}}, strict=True),
    lambda ok: load(ok, {**state(), "model": {"weight": torch.ones(6, 10), "bias": torch.zeros(3)}}),
    lambda ok: load(ok, {"model": {"weight": torch.ones(600, 1000, dtype=torch.int32)}}, strict=False),
    lambda ok: load(ok, {}),
    lambda ok: changed(ok, lambda copy: flip_bit(data_file(copy), 1_000_000)),
    lambda ok: changed(ok, lambda copy: os.truncate(data_file(copy), 5000)),
    lambda ok: changed(ok, lambda copy: data_file(copy).unlink()),
    lambda ok: changed(ok, lambda copy: os.truncate(copy / ".metadata", 500)),
    lambda ok: custom_object(),
    lambda ok: unsafe_metadata(),
    lambda ok: holdfast.save({"a": 1}),
    lambda ok: load("nosuch://place", {"a": 1}),
    lambda ok: one_file(),
    lambda ok: holdfast.save({"a": 1}, storage_writer=holdfast.FileSystemWriter(ok, overwrite=False)),
    lambda ok: holdfast.save({"a": {1: torch.ones(1), "1": torch.ones(1)}}, checkpoint_id="two"),
    lambda ok: holdfast.save({"a": lambda: 0}, checkpoint_id="function"),
    lambda ok: FakeRanks(2).run(save_different),
    lambda ok: FakeRanks(2).run(lambda rank: rank.save(state(), storage_writer=FullDisk("full"))),
]


def test_every_message_of_the_page_is_one_that_users_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    holdfast.save(state(), checkpoint_id=tmp_path / "ok")
    seen = []
    for mistake in MISTAKES:
        shutil.rmtree("changed", ignore_errors=True)
        with pytest.raises(CheckpointError) as raised:
            mistake(tmp_path / "ok")
        error = raised.value
        seen.append(f"{type(error).__name__}: {error}")
    quotes = [quote for quote in QUOTES if not quote.startswith(LOST)]
    assert len(quotes) == len(MISTAKES)
    for quote, message in zip(quotes, seen, strict=True):  # the page has the order of the list
        assert as_pattern(quote).search(message), f"the page quotes\n{quote}\nbut users see\n{message}"


def save_and_die(folder: str) -> str:
    class Dying(holdfast.FileSystemWriter):
        def write_data(self, plan: holdfast.SavePlan, planner: holdfast.SavePlanner) -> Any:
            if self.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().write_data(plan, planner)

    try:
        holdfast.save({"a": torch.ones(4), f"r{dist.get_rank()}": 1}, storage_writer=Dying(folder))
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "it was saved"


@pytest.mark.slow
def test_the_message_of_a_rank_that_died_is_one_that_users_see(tmp_path: Path) -> None:
    (quote,) = [quote for quote in QUOTES if quote.startswith(LOST)]
    survivor, _ = rank_processes().run(save_and_die, 2, str(tmp_path / "c"))
    assert as_pattern(quote).search(survivor.value), survivor
