"""The channel between ranks: beside training, in sub-groups, through failures, and gone with its group."""

from pathlib import Path
from typing import Any

import pytest
from tests.ranks import channel_life
from tests.ranks.faulty import Raised
from tests.support.ranks import Outcome, RankProcesses, rank_processes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def processes() -> RankProcesses:
    return rank_processes()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "c")


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned; that they printed nothing and ended well is checked on the way."""
    assert [outcome.kind for outcome in outcomes] == ["returned"] * len(outcomes), outcomes
    assert [outcome.stderr for outcome in outcomes] == [""] * len(outcomes)
    assert [outcome.status for outcome in outcomes] == [0] * len(outcomes)
    return [outcome.value for outcome in outcomes]


def test_six_saves_in_a_thread_run_beside_the_trainers_collectives(
    processes: RankProcesses, folder: str
) -> None:
    for steps, total, saved in values(processes.run(channel_life.save_beside_training, 3, folder)):
        assert steps > 0
        assert total == 3.0
        assert saved == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_groups_save_into_different_folders_at_once(processes: RankProcesses, folder: str) -> None:
    results = values(processes.run(channel_life.save_in_pairs, 4, folder))
    assert [mine for mine, _, _ in results] == [4.0, 4.0, 14.0, 14.0]
    assert all(both == [4.0, 14.0] and everything == 7.0 for _, both, everything in results)


def test_a_process_outside_of_the_group_is_refused(processes: RankProcesses, folder: str) -> None:
    inside, outside = values(processes.run(channel_life.stay_out_of_a_group, 2, folder))
    assert inside is None
    assert outside.kind == "UsageError"


def test_a_channel_ends_with_its_group_and_the_next_group_has_its_own(
    processes: RankProcesses, folder: str
) -> None:
    for rank, seen in enumerate(values(processes.run(channel_life.make_the_group_anew, 2, folder))):
        assert [there for there, _, _, _ in seen] == [0.0, 1.0, 2.0]
        for _, during, after, _ in seen:
            assert during == ["holdfast-coordinator" if rank == 0 else "holdfast-worker"]
            assert after == []
        assert seen[2][3] == seen[1][3]  # no file is left open


def test_a_rank_that_comes_late_raises_what_the_others_raised(processes: RankProcesses, folder: str) -> None:
    for first, second in values(processes.run(channel_life.be_late_for_a_failure, 3, folder)):
        assert list(first.failures) == [1]
        assert "on purpose" in first.failures[1]
        assert second is None


def test_ranks_that_make_different_calls_are_told_so(processes: RankProcesses, folder: str) -> None:
    for first, second in values(processes.run(channel_life.make_different_calls, 3, folder)):
        assert "same calls in the same order" in str(first.failures)
        assert second is None


def test_an_error_before_the_first_step_is_raised_on_all_ranks(processes: RankProcesses, folder: str) -> None:
    results = values(processes.run(channel_life.fail_before_the_first_step, 3, folder))
    for rank, (first, second) in enumerate(results):
        if rank == 1:
            assert first.kind == "UsageError"
        else:
            assert list(first.failures) == [1]
            assert "UsageError" in first.failures[1]
        assert second is None


def test_an_interrupt_of_a_waiting_rank_stays_one_and_the_others_are_told(
    processes: RankProcesses, folder: str
) -> None:
    results = values(processes.run(channel_life.interrupt_one_that_waits, 3, folder, "write"))
    for rank, (raised, there) in enumerate(results):
        assert there == 1.0
        if rank == 1:
            assert raised.kind == "KeyboardInterrupt"
        else:
            assert "interrupted by KeyboardInterrupt" in raised.failures[1]


def test_an_interrupt_during_the_commit_leaves_the_checkpoint_whole(
    processes: RankProcesses, folder: str
) -> None:
    results = values(processes.run(channel_life.interrupt_one_that_waits, 3, folder, "commit"))
    for rank, (raised, there) in enumerate(results):
        assert there == 2.0
        assert (raised is None) == (rank != 1)


def test_a_rank_that_dies_after_its_part_does_not_fail_the_commit(
    processes: RankProcesses, folder: str
) -> None:
    outcomes = processes.run(channel_life.kill_one_that_has_delivered, 3, folder)
    assert outcomes[0].value == (None, 2.0)
    assert outcomes[1].status != 0
    assert outcomes[2].value == (None, 2.0)


def test_a_rank_that_is_stopped_outside_of_the_save_is_named(processes: RankProcesses, folder: str) -> None:
    for by_worker, by_coordinator, after in values(
        processes.run(channel_life.stop_outside_of_a_save, 3, folder)
    ):
        assert "no sign of life" in by_worker.failures[1]
        assert "no sign of life" in by_coordinator.failures[0]
        assert after is None


def check_given_up(results: list[tuple[Raised, float]]) -> None:
    for raised, there in results:
        assert raised.kind == "CheckpointException"
        assert raised.step == "write"
        assert "no sign of life" in raised.failures[0]
        assert there == 1.0


def test_a_coordinator_that_was_given_up_does_not_commit_if_it_asks(
    processes: RankProcesses, folder: str
) -> None:
    check_given_up(values(processes.run(channel_life.stop_before_the_commit, 3, folder, True)))


def test_a_coordinator_that_was_given_up_does_not_commit(processes: RankProcesses, folder: str) -> None:
    check_given_up(values(processes.run(channel_life.stop_before_the_commit, 3, folder, False)))


def test_a_connection_that_broke_is_made_anew(processes: RankProcesses, folder: str) -> None:
    assert values(processes.run(channel_life.break_a_connection, 3, folder)) == [[None, 3.0]] * 3


def test_values_and_failures_travel_between_ranks(processes: RankProcesses) -> None:
    for rank, heard in enumerate(values(processes.run(channel_life.talk, 3, destroy=True))):
        assert heard[:5] == [True, ([0, 1, 2], True), 0, None, 3]
        said, answered, shared, left = heard[5:9]
        assert "lock" in said.failures[1]
        assert "lock" in answered.failures[0]
        assert answered.step == "answer"
        assert "FileNotFoundError" in shared.failures[0]
        assert left.kind == ("ValueError" if rank == 1 else "CheckpointException")
        assert rank == 1 or "ValueError: on purpose" in left.failures[1]
        assert heard[9] == 3


def test_a_group_of_one_needs_no_channel(processes: RankProcesses, folder: str) -> None:
    assert values(processes.run(channel_life.save_in_a_world_of_one, 1, folder)) == [(1.0, [])]


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_are_passed_on_from_one_rank_to_the_others(processes: RankProcesses, world_size: int) -> None:
    for is_right, _rates in values(processes.run(channel_life.pass_on, world_size, 8, 1)):
        assert is_right


@pytest.mark.parametrize("kind", ["OSError", "SIGKILL", "SIGSTOP"])
def test_a_rank_that_is_lost_while_bytes_are_passed_on_is_named(processes: RankProcesses, kind: str) -> None:
    outcomes = processes.run(channel_life.lose_a_rank_of_a_broadcast, 3, kind)
    for rank, outcome in enumerate(outcomes):
        if rank != 1 or kind != "SIGKILL":
            assert outcome.kind == "returned", outcome
            assert outcome.stderr == ""
            assert outcome.value.step == "pass on"
            assert list(outcome.value.failures) == [1]
