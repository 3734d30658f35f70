"""Records reach listeners, the log, OpenTelemetry and a file for Prometheus, and never fail a save."""

import json
import logging
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import python_environment

import holdfast
from holdfast.records import PrometheusFile, TransferRecord, add_listener
from holdfast.state_dict_saver import SaveFuture


def state() -> dict[str, Any]:
    return {"x": torch.ones(1000)}


@pytest.fixture
def heard() -> Iterator[list[TransferRecord]]:
    found: list[TransferRecord] = []
    remove = add_listener(found.append)
    yield found
    remove()
    remove()


def test_listeners_get_the_record_of_every_save_and_load_until_they_are_removed(
    tmp_path: Path, heard: list[TransferRecord]
) -> None:
    metadata = holdfast.save(state(), checkpoint_id=tmp_path)
    loaded = holdfast.load(state(), checkpoint_id=tmp_path)
    future = holdfast.async_save(state(), checkpoint_id=tmp_path)
    assert isinstance(future, SaveFuture)
    future.result()
    assert heard == [metadata.record, loaded.record, future.record]
    remove = add_listener(lambda _: pytest.fail("it was removed"))
    remove()
    holdfast.save(state(), checkpoint_id=tmp_path)
    assert len(heard) == 4


def test_a_save_that_fails_has_no_record(tmp_path: Path, heard: list[TransferRecord]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(holdfast.CheckpointException):
        holdfast.save(state(), checkpoint_id=tmp_path / "file")
    assert heard == []


def test_a_listener_that_fails_is_logged_and_the_save_succeeds(
    tmp_path: Path, heard: list[TransferRecord], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: TransferRecord) -> None:
        raise ZeroDivisionError("on purpose")

    remove = add_listener(fail)
    try:
        holdfast.save(state(), checkpoint_id=tmp_path)
    finally:
        remove()
    assert len(heard) == 1
    (line,) = [line for line in caplog.records if line.levelno == logging.WARNING]
    assert "on purpose" in caplog.text
    assert line.name == "holdfast.records"


def test_a_save_and_a_load_say_one_line_with_place_bytes_seconds_and_rate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    record = holdfast.save(state(), checkpoint_id=tmp_path).record
    holdfast.load(state(), checkpoint_id=tmp_path)
    assert record is not None
    saved, loaded = caplog.records
    number = r"[\d.]+ (B|KiB|MiB|s)"
    assert re.fullmatch(
        rf"saved {re.escape(str(tmp_path))}: {number} in {number} \({number}/s\)", saved.message
    )
    assert loaded.message.startswith(f"loaded {tmp_path}: ")
    fields = vars(saved)["holdfast"]
    assert fields["nbytes"] == record.nbytes
    assert fields["place"] == str(tmp_path)
    assert fields["seconds"] == record.seconds
    assert fields["phases"].keys() == {"prepare", "plan", "write", "commit"}
    json.dumps(fields)


def test_the_file_for_prometheus_has_the_last_save_and_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "holdfast.prom"
    monkeypatch.setenv("HOLDFAST_PROMETHEUS_FILE", str(path))
    for _ in range(2):
        record = holdfast.save(state(), checkpoint_id=tmp_path / "c").record
    holdfast.load(state(), checkpoint_id=tmp_path / "c")
    assert record is not None
    samples = parse_prometheus(path.read_text())
    assert samples['holdfast_transfers_total{kind="save"}'] == 2
    assert samples['holdfast_last_bytes{kind="save",mode="blocking"}'] == record.nbytes
    assert samples['holdfast_last_seconds{kind="save",mode="blocking"}'] == record.seconds
    assert samples['holdfast_last_phase_seconds{kind="save",phase="write",rank="0"}'] > 0
    assert samples['holdfast_last_phase_seconds{kind="load",phase="read",rank="0"}'] > 0
    ended = samples['holdfast_last_finished_timestamp_seconds{kind="save",mode="blocking"}']
    assert ended == pytest.approx(record.started_at + record.seconds)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c", "holdfast.prom"]


def parse_prometheus(text: str) -> dict[str, float]:
    """The samples of a file in the text format; fails if a line is not of it, or a family comes twice."""
    families: list[str] = []
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if match := re.fullmatch(r"# TYPE (\w+) (gauge|counter)", line):
            families.append(match[1])
        elif not line.startswith("# HELP "):
            sample = re.fullmatch(r'((\w+)(?:\{(?:\w+="[^"\n]*",?)*\})?) (\S+)', line)
            assert sample is not None, line
            assert sample[2] == families[-1]
            samples[sample[1]] = float(sample[3])
    assert len(set(families)) == len(families)
    assert text.endswith("\n")
    return samples


def test_a_file_for_prometheus_that_cannot_be_written_leaves_nothing_and_fails_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").mkdir()
    remove = add_listener(PrometheusFile(tmp_path / "taken"))
    try:
        holdfast.save(state(), checkpoint_id=tmp_path / "c")
    finally:
        remove()
    assert "could not be given" in caplog.text
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c", "taken"]


class FakeSpan:
    def __init__(self, name: str, parent: Any, options: dict[str, Any]) -> None:
        self.name, self.parent, self.options, self.ended = name, parent, options, 0

    def end(self, end_time: int) -> None:
        self.ended = end_time


def test_a_program_that_uses_open_telemetry_gets_a_span_with_one_child_for_each_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[FakeSpan] = []

    class Tracer:
        def start_span(self, name: str, context: Any = None, **options: Any) -> FakeSpan:
            spans.append(FakeSpan(name, context, options))
            return spans[-1]

    trace: Any = types.ModuleType("opentelemetry.trace")
    trace.get_tracer = lambda _: Tracer()
    trace.set_span_in_context = lambda span: ("inside", span)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", trace)
    record = holdfast.save(state(), checkpoint_id=tmp_path).record
    assert record is not None
    whole, *children = spans
    assert [span.name for span in spans] == [
        "holdfast.save",
        "holdfast.save.prepare",
        "holdfast.save.plan",
        "holdfast.save.write",
        "holdfast.save.commit",
    ]
    assert all(child.parent == ("inside", whole) for child in children)
    assert whole.options["attributes"]["holdfast.nbytes"] == record.nbytes
    assert (whole.ended - whole.options["start_time"]) / 1e9 == pytest.approx(record.seconds, abs=1e-5)
    assert children[0].options["start_time"] == whole.options["start_time"]
    assert children[-1].ended == pytest.approx(whole.ended, abs=2e4)


@pytest.mark.slow
@pytest.mark.one_core
def test_nothing_is_imported_for_telemetry_that_the_program_does_not_use(tmp_path: Path) -> None:
    program = f"""
import sys, torch, holdfast
holdfast.save({{"x": torch.ones(3)}}, checkpoint_id={str(tmp_path)!r})
found = {{name.partition(".")[0] for name in sys.modules}}
assert not found & {{"opentelemetry", "rich", "prometheus_client"}}, found
"""
    subprocess.run([sys.executable, "-c", program], env=python_environment(), check=True)
