"""Saves in the background of several ranks: beside training; failing, cancelled or skipped on all alike."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.background import programs
from tests.support.ranks import Outcome, RankProcesses, rank_processes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def processes() -> RankProcesses:
    return rank_processes()


def returned(outcomes: list[Outcome]) -> list[Any]:
    assert [outcome.kind for outcome in outcomes] == ["returned"] * len(outcomes), outcomes
    return [outcome.value for outcome in outcomes]


def test_training_goes_on_with_its_collectives_beside_saves(processes: RankProcesses, tmp_path: Path) -> None:
    outcomes = processes.run(programs.train_beside_saves, 2, str(tmp_path))
    assert returned(outcomes) == [[float(step) for step in range(8)]] * 2
    assert [outcome.status for outcome in outcomes] == [0, 0]


@pytest.mark.parametrize(
    "next_call",
    [
        "save",
        "async_save",
        "load",
    ],
)
def test_a_failure_that_one_rank_has_not_seen_is_raised_on_all_by_the_next_call(
    processes: RankProcesses, tmp_path: Path, next_call: str
) -> None:
    outcomes = processes.run(programs.fail_on_one_rank, 2, str(tmp_path / "c"), next_call)
    (looked, first, third, between), (_, other, other_third, _) = returned(outcomes)
    assert "rank 1" in looked
    assert "on purpose" in looked
    assert first == other
    assert "an earlier save in the background" in first
    assert "rank 1: OSError: [Errno 5] on purpose" in first
    assert between == 1.0
    assert (third, other_third) == ("nothing", "nothing")
    assert [outcome.status for outcome in outcomes] == [0, 0]


def test_a_save_cancelled_on_one_rank_is_cancelled_on_all(processes: RankProcesses, tmp_path: Path) -> None:
    outcomes = processes.run(programs.cancel_on_one_rank, 2, str(tmp_path / "c"))
    assert returned(outcomes) == [(False, True, []), (True, True, [])]
    assert [(outcome.status, outcome.stderr) for outcome in outcomes] == [(0, "")] * 2


def test_all_ranks_skip_if_one_is_busy(processes: RankProcesses, tmp_path: Path) -> None:
    outcomes = processes.run(programs.skip_where_one_rank_is_busy, 2, str(tmp_path))
    for skipped, error, value in returned(outcomes):
        assert skipped
        assert "earlier save is not done" in error
        assert value == 3.0


def test_staging_that_fails_on_one_rank_fails_the_futures_of_the_others(
    processes: RankProcesses, tmp_path: Path
) -> None:
    outcomes = processes.run(programs.fail_to_stage_on_one_rank, 2, str(tmp_path / "c"))
    (where, told), (other_where, other_told) = returned(outcomes)
    assert (where, other_where) == ("future", "call")
    assert "not to be copied" in other_told
    assert "rank 1" in told
    assert "not to be copied" in told


def test_a_rank_that_is_killed_is_named_by_the_futures_of_the_others(
    processes: RankProcesses, tmp_path: Path
) -> None:
    outcomes = processes.run(programs.lose_a_rank, 2, str(tmp_path / "c"))
    assert outcomes[1].status == signal.SIGKILL
    assert "rank 1 is lost" in outcomes[0].value
    assert not (tmp_path / "c" / ".metadata").exists()


def test_a_save_is_finished_although_the_group_is_destroyed_and_the_programs_end(
    processes: RankProcesses, tmp_path: Path
) -> None:
    outcomes = processes.run(programs.leave_at_once, 2, str(tmp_path / "c"), destroy=True, finalize=True)
    assert [(outcome.status, outcome.stderr) for outcome in outcomes] == [(0, "")] * 2
    assert programs.loaded(tmp_path / "c") == 2.0


def test_every_rank_ends_with_a_status_if_nobody_saw_a_failure(
    processes: RankProcesses, tmp_path: Path
) -> None:
    outcomes = processes.run(programs.leave_a_failure_of_one_rank, 2, str(tmp_path / "c"), finalize=True)
    assert [os.waitstatus_to_exitcode(outcome.status) for outcome in outcomes] == [120, 120]
    for outcome in outcomes:
        assert "rank 1: OSError: [Errno 5] on purpose" in outcome.stderr


def test_large_metadata_is_not_sent_to_other_ranks(processes: RankProcesses, tmp_path: Path) -> None:
    """They read it when they look: so what they see when it is gone shows that they were not sent it."""
    outcomes = processes.run(programs.look_at_metadata_of_a_removed_checkpoint, 2, str(tmp_path / "c"))
    assert returned(outcomes) == ["TensorStorageMetadata", "CheckpointNotFoundError"]
