"""``holdfast trace`` shows where the time of a save went, and writes it for Perfetto."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.stock_torch import stock_save

import holdfast
from holdfast.cli import main
from holdfast.testing import FakeRanks


def state(rank: int = 0) -> dict[str, Any]:
    return {f"x{rank}": torch.ones(1000)}


def test_the_phases_are_shown_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    holdfast.save(state(), checkpoint_id=tmp_path)
    assert main(["trace", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{tmp_path}: ")
    assert [line.split()[0] for line in lines[1:]] == ["phase", "prepare", "plan", "write"]


def test_a_trace_has_a_row_for_each_rank_and_a_slice_for_each_phase(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeRanks(2).run(lambda rank: rank.save(state(rank.rank), checkpoint_id=tmp_path / "c"))
    assert main(["trace", str(tmp_path / "c"), "-o", str(tmp_path / "trace.json"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)["record"]
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert_is_a_chrome_trace(trace)
    names = {
        event["pid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    }
    slowest = record["slowest"]["rank"]
    assert names == {rank: f"rank {rank} (slowest)" if rank == slowest else f"rank {rank}" for rank in (0, 1)}
    for rank in (0, 1):
        slices = [
            event
            for event in trace["traceEvents"]
            if event["ph"] == "X" and event["pid"] == rank and event["tid"] == 0
        ]
        assert [one["name"] for one in slices] == ["prepare", "plan", "write"]
        for before, after in itertools.pairwise(slices):
            assert before["ts"] + before["dur"] == pytest.approx(after["ts"], abs=1)
    assert trace["otherData"]["nbytes"] == record["nbytes"] > 8000


def assert_is_a_chrome_trace(trace: dict[str, Any]) -> None:
    """What the Trace Event Format demands of complete events and of metadata events."""
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
        else:
            assert event["ph"] == "M"
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")


def test_parts_of_ranks_become_one_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    holdfast.save(state(), checkpoint_id=tmp_path, use_collectives=False)
    assert main(["trace", str(tmp_path)]) == 0
    assert "by 1 rank in" in capsys.readouterr().out


def test_a_checkpoint_of_torch_has_nothing_to_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stock_save(state(), checkpoint_id=tmp_path)
    assert main(["trace", str(tmp_path)]) == 3
    assert "has no record of its save" in capsys.readouterr().err
