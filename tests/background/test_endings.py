"""Processes that end while a save runs in the background, or after one has failed unseen."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.background import programs
from tests.background.programs import loaded, state
from tests.support.ranks import Outcome, RankProcesses, rank_processes

import holdfast

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def processes() -> RankProcesses:
    return rank_processes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint that is there before."""
    holdfast.save(state(1), checkpoint_id=tmp_path / "c")
    return tmp_path / "c"


def end_of(processes: RankProcesses, program: Callable[..., object], *args: object) -> Outcome:
    """How a process ends that runs the program, with the interpreter taken down as for any program."""
    (outcome,) = processes.run(program, 1, *args, finalize=True)
    return outcome


@pytest.mark.parametrize("status", [0, 3])
def test_the_end_of_a_program_waits_for_its_save(processes: RankProcesses, folder: Path, status: int) -> None:
    outcome = end_of(processes, programs.leave_during_a_save, str(folder), status)
    assert os.waitstatus_to_exitcode(outcome.status) == status
    assert outcome.stderr == ""
    assert loaded(folder) == 2.0


@pytest.mark.parametrize(
    "program", [programs.leave_an_unseen_failure, programs.leave_a_failure_of_the_last_moment]
)
def test_a_failure_that_nobody_saw_is_printed_at_the_end_with_an_exit_status(
    processes: RankProcesses, folder: Path, program: Callable[..., object]
) -> None:
    before = sorted(os.listdir(folder))
    outcome = end_of(processes, program, str(folder))
    assert outcome.kind == "returned"
    assert os.waitstatus_to_exitcode(outcome.status) == 120
    assert "nobody looked at its future" in outcome.stderr
    assert "OSError: [Errno 5] on purpose" in outcome.stderr
    assert str(folder) in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert f"the save to {folder} in the background failed: OSError: [Errno 5] on purpose" in outcome.stderr
    assert loaded(folder) == 1.0
    assert sorted(os.listdir(folder)) == before


def test_a_failure_that_was_seen_is_not_logged_too_and_the_program_ends_well(
    processes: RankProcesses, folder: Path
) -> None:
    outcome = end_of(processes, programs.leave_a_seen_failure, str(folder))
    assert outcome.status == 0
    assert outcome.stderr == ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_program_killed_during_a_save_leaves_the_old_checkpoint(
    processes: RankProcesses, folder: Path, number: signal.Signals
) -> None:
    outcome = end_of(processes, programs.be_killed_during_a_save, str(folder), int(number))
    assert os.waitstatus_to_exitcode(outcome.status) == -number
    assert loaded(folder) == 1.0
    holdfast.save(state(3), checkpoint_id=folder)
    assert loaded(folder) == 3.0


def test_a_save_is_finished_in_the_grace_period_after_sigterm(processes: RankProcesses, folder: Path) -> None:
    outcome = end_of(processes, programs.finish_in_the_grace_period, str(folder))
    assert os.waitstatus_to_exitcode(outcome.status) == -signal.SIGTERM
    assert loaded(folder) == 2.0


def test_a_save_that_takes_longer_than_the_grace_period_is_given_up_without_a_trace(
    processes: RankProcesses, folder: Path
) -> None:
    before = sorted(os.listdir(folder))
    outcome = end_of(processes, programs.give_up_after_the_grace_period, str(folder))
    assert os.waitstatus_to_exitcode(outcome.status) == -signal.SIGTERM
    assert loaded(folder) == 1.0
    assert sorted(os.listdir(folder)) == before


def test_a_handler_of_the_programs_own_is_left_alone(processes: RankProcesses, folder: Path) -> None:
    outcome = end_of(processes, programs.keep_their_handler, str(folder))
    assert (outcome.kind, outcome.value, outcome.status) == ("returned", True, 0)


def test_a_full_disk_is_told_by_the_future_and_the_old_checkpoint_stays(
    processes: RankProcesses, folder: Path
) -> None:
    outcome = end_of(processes, programs.fill_the_disk, str(folder))
    assert (outcome.kind, outcome.value) == ("returned", (errno.EFBIG, 1.0)), outcome.value


def test_fifty_saves_take_no_more_memory_than_two(processes: RankProcesses, folder: Path) -> None:
    outcome = end_of(processes, programs.save_fifty_times, str(folder))
    assert outcome.kind == "returned", outcome.value
    assert max(outcome.value[2:]) <= 1.05 * outcome.value[1]
