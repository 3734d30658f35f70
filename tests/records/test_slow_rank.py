"""A rank that is slow in one phase is named with it: on every rank, in the log and in the manifest."""

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import run_ranks

import holdfast
from holdfast.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from holdfast.records import TransferRecord
from holdfast.state_dict_saver import AsyncCheckpointerType, SaveFuture

pytestmark = [pytest.mark.slow, pytest.mark.one_core]

DELAY = 2.0
SLOW = 1


def delay(phase: str, wanted: str) -> None:
    if phase == wanted and dist.get_rank() == SLOW:
        time.sleep(DELAY)


class SlowPlanner(DefaultSavePlanner):
    phase = ""

    def create_local_plan(self) -> holdfast.SavePlan:
        delay(self.phase, "plan")
        return super().create_local_plan()


class SlowLoadPlanner(DefaultLoadPlanner):
    phase = ""

    def create_local_plan(self) -> holdfast.LoadPlan:
        delay(self.phase, "plan")
        return super().create_local_plan()


class SlowWriter(holdfast.FileSystemWriter):
    phase = ""

    def write_data(self, plan: holdfast.SavePlan, planner: holdfast.SavePlanner) -> Any:
        if self.phase == "write" and self.rank == SLOW:
            time.sleep(DELAY)
        return super().write_data(plan, planner)

    def finish(self, metadata: holdfast.Metadata, results: Any) -> None:
        if self.phase == "commit":
            time.sleep(DELAY)
        super().finish(metadata, results)


class SlowReader(holdfast.FileSystemReader):
    phase = ""

    def read_data(self, plan: holdfast.LoadPlan, planner: holdfast.LoadPlanner) -> Any:
        delay(self.phase, "read")
        return super().read_data(plan, planner)


class SlowState:
    def __init__(self, phase: str) -> None:
        self.phase = phase

    def state_dict(self) -> dict[str, Any]:
        delay(self.phase, "prepare")
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        delay(self.phase, "restore")


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


Result = tuple[TransferRecord, float, list[tuple[int, str, dict[str, Any]]]]


def state(phase: str) -> dict[str, Any]:
    tensors = {f"t{rank}": torch.full((1 << 18,), float(rank)) for rank in range(dist.get_world_size())}
    return {"model": tensors, "slow": SlowState(phase)}


def watched(call: Any) -> Result:
    """The record of a call, how long it took, and what was logged."""
    lines = Lines()
    logger = logging.getLogger("holdfast.records")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(lines)
    dist.barrier()
    began = time.perf_counter()
    record = call()
    seconds = time.perf_counter() - began
    return record, seconds, [(one.levelno, one.getMessage(), vars(one)["holdfast"]) for one in lines.records]


def slow_save(folder: str, phase: str, mode: str) -> Result:
    planner, writer = SlowPlanner(), SlowWriter(folder)
    planner.phase = writer.phase = phase
    given: dict[str, Any] = {"storage_writer": writer, "planner": planner}

    def call() -> TransferRecord | None:
        if mode == "blocking":
            return holdfast.save(state(phase), **given).record
        kind = AsyncCheckpointerType(mode)
        future = holdfast.async_save(state(phase), async_checkpointer_type=kind, **given)
        assert isinstance(future, SaveFuture)
        future.result()
        return future.record

    return watched(call)


def slow_load(folder: str, phase: str) -> Result:
    planner, reader = SlowLoadPlanner(), SlowReader(folder)
    planner.phase = reader.phase = phase
    return watched(lambda: holdfast.load(state(phase), storage_reader=reader, planner=planner).record)


def outcomes(found: list[Any]) -> list[Result]:
    assert [kind for kind, _ in found] == ["returned"] * len(found), found
    return [value for _, value in found]


def assert_named(results: list[Result], phase: str, rank: int) -> None:
    for number, (record, seconds, _) in enumerate(results):
        assert record.rank == number
        assert record.slowest is not None
        assert (record.slowest.rank, record.slowest.phase) == (rank, phase)
        assert DELAY <= record.slowest.seconds < DELAY + 1
        mine = record.of_rank(number)
        assert mine is not None
        assert mine.seconds == pytest.approx(seconds, rel=0.05)
        assert [row.rank for row in record.ranks] == [0, 1, 2]
        if number != rank:
            # What it waited is not taken for work.
            assert mine.waited > 0.8 * DELAY
            assert mine.seconds - mine.waited < DELAY / 2
    level, message, fields = results[0][2][-1]
    assert level == logging.INFO
    assert f"slowest of 3 ranks: rank {rank} in '{phase}'" in message
    assert (fields["slowest_rank"], fields["slowest_phase"]) == (rank, phase)
    assert all(level == logging.DEBUG for _, _, lines in results[1:] for level, _, _ in lines)


@pytest.mark.parametrize("phase", ["prepare", "plan", "write", "commit"])
def test_a_slow_rank_of_a_save_is_named(tmp_path: Path, phase: str) -> None:
    results = outcomes(run_ranks(slow_save, 3, str(tmp_path), phase, "blocking"))
    assert_named(results, phase, 0 if phase == "commit" else SLOW)
    kept = holdfast.FileSystemReader(tmp_path).read_metadata().record
    assert kept is not None
    if phase != "commit":
        assert kept.slowest is not None
        assert (kept.slowest.rank, kept.slowest.phase) == (SLOW, phase)
    coordinator = results[0][0]
    assert coordinator.nbytes == kept.nbytes == sum(file.stat().st_size for file in tmp_path.glob("*.distcp"))
    assert [row.nbytes for row in kept.ranks] == [row.nbytes for row in coordinator.ranks]
    ends = [row.start + row.seconds for row in coordinator.ranks]
    assert max(ends) - min(ends) < 0.1 * DELAY  # on one time line, all ranks end with the commit


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_slow_rank_of_a_save_in_the_background_is_named(tmp_path: Path, mode: str) -> None:
    results = outcomes(run_ranks(slow_save, 3, str(tmp_path), "write", mode))
    for record, _, _ in results:
        write = next(phase for phase in record.phases if phase.name == "write")
        assert write.slowest_rank == SLOW
        assert write.longest >= DELAY
        assert write.median < DELAY / 2
        mine = record.of_rank(record.rank)
        assert mine is not None
        assert mine.stall < mine.seconds - DELAY / 2


@pytest.mark.parametrize("phase", ["prepare", "plan", "read"])
def test_a_slow_rank_of_a_load_is_named(tmp_path: Path, phase: str) -> None:
    outcomes(run_ranks(slow_save, 3, str(tmp_path), "", "blocking"))
    assert_named(outcomes(run_ranks(slow_load, 3, str(tmp_path), phase)), phase, SLOW)


def test_what_comes_after_the_last_message_is_in_the_record_of_its_rank(tmp_path: Path) -> None:
    outcomes(run_ranks(slow_save, 3, str(tmp_path), "", "blocking"))
    for record, _, _ in outcomes(run_ranks(slow_load, 3, str(tmp_path), "restore")):
        restore = next(phase for phase in record.phases if phase.name == "restore")
        assert restore.slowest_rank == record.rank
        assert (restore.longest >= DELAY) == (record.rank == SLOW)
        assert record.slowest is not None
        assert record.slowest.phase != "restore"  # nobody waited for it
