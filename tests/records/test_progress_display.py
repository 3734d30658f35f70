"""Progress is a bar in a terminal and a log line elsewhere; a function is told of every step."""

import io
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import progress_display
from holdfast.errors import UsageError
from holdfast.progress_display import observer
from holdfast.state_dict_saver import Progress

GIB = 1 << 30


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that displays see: the only entry."""
    now = [100.0]
    monkeypatch.setattr("holdfast.progress_display.time.monotonic", lambda: now[0])
    return now


def test_nobody_is_told_unless_asked_for() -> None:
    assert observer(None, "saving") is None
    assert observer(False, "saving") is None
    assert observer(True, "saving", rank=1, stream=Terminal()) is None
    with pytest.raises(UsageError, match="True, False or a function"):
        observer("yes", "saving")  # type: ignore[arg-type]


def test_a_function_is_told_on_every_rank() -> None:
    told: list[Progress] = []
    with observer(told.append, "saving", rank=3) or pytest.fail("nobody") as watching:
        watching(Progress(1, 2, 3.0))
    assert told == [Progress(1, 2, 3.0)]


def test_a_terminal_shows_bytes_rate_and_time_left_in_a_bar_that_is_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    with observer(True, "saving [run]/7", stream=stream) or pytest.fail("nobody") as watching:
        watching(Progress(0, 4 * GIB, 0.0))
        assert stream.getvalue() == ""  # nothing is drawn for what is done at once
        clock[0] += 0.2
        watching(Progress(GIB, 4 * GIB, GIB / 2))
        drawn = stream.getvalue()
        watching(Progress(2 * GIB, 4 * GIB, GIB / 2))
        assert stream.getvalue() == drawn  # not more often than the eye can see
    assert "saving [run]/7" in drawn
    assert "25% 1.0 GiB of 4.0 GiB, 512.0 MiB/s, 6.0 s left" in drawn
    assert stream.getvalue().endswith("\r\033[K")


def test_a_bar_is_never_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    with observer(True, "saving " + 100 * "long/", stream=stream) or pytest.fail("nobody") as watching:
        clock[0] += 0.2
        watching(Progress(GIB, 4 * GIB, GIB / 2))
        line = stream.getvalue().removeprefix("\r\033[K")
    assert len(line) == 59
    assert line.endswith("25% 1.0 GiB of 4.0 GiB, 512.0 MiB/s, 6.0 s left")


def test_elsewhere_it_is_a_log_line_every_ten_seconds(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    with observer(True, "loading x", stream=io.StringIO()) or pytest.fail("nobody") as watching:
        for second in range(25):
            clock[0] = 100.0 + second
            watching(Progress(second * GIB, 25 * GIB, GIB))
    assert [line.message for line in caplog.records] == [
        "loading x:  40% 10.0 GiB of 25.0 GiB, 1.0 GiB/s, 15.0 s left",
        "loading x:  80% 20.0 GiB of 25.0 GiB, 1.0 GiB/s, 5.0 s left",
    ]


def test_save_and_load_draw_on_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(progress_display, "_REDRAW", 0.0)
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    state: dict[str, Any] = {"x": torch.ones(5 << 20)}
    holdfast.save(state, checkpoint_id=tmp_path, progress=True)
    holdfast.load(state, checkpoint_id=tmp_path, progress=True)
    drawn = stream.getvalue().split("\r\033[K")
    assert any(f"saving {tmp_path} [" in line and "100% 20.0 MiB of 20.0 MiB" in line for line in drawn)
    assert any(f"loading {tmp_path} [" in line and "100% 20.0 MiB of 20.0 MiB" in line for line in drawn)
    assert drawn[-1] == ""


def test_a_bar_ends_when_the_save_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    (tmp_path / "file").touch()
    with pytest.raises(holdfast.CheckpointException):
        holdfast.save({"x": 1}, checkpoint_id=tmp_path / "file", progress=True)
    assert stream.getvalue().endswith("\r\033[K")
