"""Every save and load says how long its phases took, and the phases are all of the time."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.stock_torch import stock_save
from torch.distributed.checkpoint import filesystem as torch_filesystem

import holdfast
from holdfast.records import TransferRecord
from holdfast.state_dict_saver import AsyncCheckpointerType, SaveFuture

MIB = 1 << 20
BACKGROUND = ["prepare", "stage", "plan", "write", "commit"]


def state(value: float = 1.0, nbytes: int = MIB) -> dict[str, Any]:
    return {"x": torch.full((nbytes // 4,), value), "step": 3}


def names(record: TransferRecord) -> list[str]:
    return [phase.name for phase in record.phases]


def best_covered(transfer: Callable[[], TransferRecord | None]) -> TransferRecord:
    """The record of several transfers that leaves the least of the time measured from outside.

    A busy machine may stop this process between the two clocks; not each time.
    """
    tries = []
    for _ in range(6):  # the first one starts things
        began = time.perf_counter()
        record = transfer()
        seconds = time.perf_counter() - began
        assert record is not None
        tries.append((abs(seconds - record.seconds), seconds, record))
    _, seconds, record = min(tries, key=lambda one: one[0])
    assert record.seconds == pytest.approx(seconds, rel=0.05, abs=0.002)
    assert_without_gaps(record)
    return record


def assert_without_gaps(record: TransferRecord) -> None:
    """The phases follow each other, and together are the time of the record."""
    (mine,) = record.ranks
    assert mine.seconds == pytest.approx(record.seconds)
    at = 0.0
    for phase in mine.phases:
        assert phase.start == pytest.approx(at, abs=1e-6)
        assert 0 <= phase.waited <= phase.seconds
        at += phase.seconds
    assert at == pytest.approx(record.seconds)


def test_the_phases_of_a_save_are_all_of_its_time(tmp_path: Path) -> None:
    saved = state()
    record = best_covered(lambda: holdfast.save(saved, checkpoint_id=tmp_path).record)
    assert names(record) == ["prepare", "plan", "write", "commit"]
    assert (record.kind, record.mode, record.place) == ("save", "blocking", str(tmp_path))
    assert record.stall == record.seconds
    files = sum(file.stat().st_size for file in tmp_path.glob("*.distcp"))
    assert record.nbytes == record.ranks[0].nbytes == files > MIB
    assert record.rate == record.nbytes / record.seconds
    assert time.time() - 60 < record.started_at < time.time()


def test_the_phases_of_a_load_are_all_of_its_time(tmp_path: Path) -> None:
    holdfast.save(state(), checkpoint_id=tmp_path)
    target = state(0.0)
    record = best_covered(lambda: holdfast.load(target, checkpoint_id=tmp_path).record)
    assert names(record) == ["prepare", "read metadata", "plan", "read", "restore"]
    assert record.kind == "load"
    assert MIB <= record.nbytes < 1.1 * MIB


def test_what_a_stateful_object_does_is_in_prepare_and_in_restore(tmp_path: Path) -> None:
    class Slow:
        def state_dict(self) -> dict[str, Any]:
            time.sleep(0.05)
            return {"a": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            time.sleep(0.05)

    saved = holdfast.save({"slow": Slow()}, checkpoint_id=tmp_path).record
    loaded = holdfast.load({"slow": Slow()}, checkpoint_id=tmp_path).record
    assert saved is not None
    assert loaded is not None
    prepare, restore = saved.ranks[0].phase("prepare"), loaded.ranks[0].phase("restore")
    assert prepare is not None
    assert restore is not None
    assert prepare.busy > 0.05
    assert restore.busy > 0.05


@pytest.mark.parametrize(
    "mode", ["thread", pytest.param("process", marks=[pytest.mark.slow, pytest.mark.one_core])]
)
def test_a_save_in_the_background_says_what_the_trainer_waited(tmp_path: Path, mode: str) -> None:
    saved = state(nbytes=16 * MIB)
    called: dict[float, float] = {}

    def save_behind() -> TransferRecord | None:
        began = time.perf_counter()
        future = holdfast.async_save(
            saved,
            checkpoint_id=tmp_path,
            async_checkpointer_type=AsyncCheckpointerType(mode),
        )
        seconds = time.perf_counter() - began
        assert isinstance(future, SaveFuture)
        metadata, record = future.result(), future.record
        assert metadata is not None
        assert record is not None
        assert record is metadata.record
        called[record.started_at] = seconds
        return record

    record = best_covered(save_behind)
    assert record.mode == mode
    assert names(record) == (
        BACKGROUND if mode == "thread" else [*BACKGROUND[:3], "hand over", *BACKGROUND[3:]]
    )
    assert 0 < record.stall <= called[record.started_at]
    stage, write = record.ranks[0].phase("stage"), record.ranks[0].phase("write")
    assert stage is not None
    assert write is not None
    assert stage.nbytes == 16 * MIB
    assert 16 * MIB < write.nbytes < 17 * MIB


def test_the_manifest_keeps_the_record_of_the_save_until_the_commit(tmp_path: Path) -> None:
    made = holdfast.save(state(), checkpoint_id=tmp_path).record
    kept = holdfast.FileSystemReader(tmp_path).read_metadata().record
    assert made is not None
    assert kept is not None
    assert names(kept) == ["prepare", "plan", "write"]
    assert kept.phases[:2] == made.phases[:2]
    assert (kept.nbytes, kept.place, kept.kind) == (made.nbytes, made.place, "save")
    assert kept.started_at == made.started_at
    (mine,) = kept.ranks
    for phase in mine.phases[:2]:
        same = made.ranks[0].phase(phase.name)
        assert same is not None
        assert phase.seconds == pytest.approx(same.seconds, rel=1e-6)


def test_a_rank_that_saves_its_own_part_keeps_its_own_record(tmp_path: Path) -> None:
    record = holdfast.save(state(), checkpoint_id=tmp_path, use_collectives=False).record
    assert record is not None
    assert record.world_size == 1
    assert names(record) == ["prepare", "plan", "write", "commit"]


def test_a_record_is_plain_data_for_json(tmp_path: Path) -> None:
    record = holdfast.save(state(), checkpoint_id=tmp_path).record
    assert record is not None
    plain = json.loads(json.dumps(record.as_dict()))
    assert plain["nbytes"] == record.nbytes
    assert plain["slowest"]["phase"] in names(record)
    assert [phase["name"] for phase in plain["ranks"][0]["phases"]] == names(record)
    stored = holdfast.FileSystemReader(tmp_path).read_metadata().record
    assert stored is not None
    assert json.loads(json.dumps(stored.as_dict()))["ranks"][0]["rank"] == 0


def test_checkpoints_of_torch_have_no_record_and_torch_writes_none_through_our_writer(tmp_path: Path) -> None:
    stock_save(state(), checkpoint_id=tmp_path / "theirs")
    assert holdfast.FileSystemReader(tmp_path / "theirs").read_metadata().record is None
    writer: Any = holdfast.FileSystemWriter(tmp_path / "ours")
    stock_save(state(), storage_writer=writer)
    assert holdfast.FileSystemReader(tmp_path / "ours").read_metadata().record is None


def test_a_file_system_that_refuses_o_direct_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast._io.write_back.set_direct", lambda _fd, _on: False)
    record = holdfast.save(state(nbytes=16 * MIB), checkpoint_id=tmp_path, page_cache="bypass").record
    assert record is not None
    assert record.fallbacks == {"page cache instead of O_DIRECT": 1}
    assert "1 x page cache instead of O_DIRECT" in str(record)
    stored = holdfast.FileSystemReader(tmp_path).read_metadata().record
    assert stored is not None
    assert dict(stored.ranks[0].events) == record.fallbacks


def test_a_storage_that_reports_no_progress_still_has_its_bytes(tmp_path: Path) -> None:
    storage: Any = torch_filesystem.FileSystemWriter(tmp_path)
    record = holdfast.save(state(), storage_writer=storage).record
    assert record is not None
    assert record.nbytes > MIB
