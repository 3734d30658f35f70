"""A rank that fails, leaves, dies or stops is named on all others; nothing is committed; life goes on."""

from pathlib import Path

import pytest
from tests.ranks import faulty
from tests.ranks.faulty import LOAD_PLACES, OF_THE_COORDINATOR, SAVE_PLACES, Case, Raised
from tests.support.ranks import RankProcesses, rank_processes

pytestmark = pytest.mark.slow

WORLD = 3
TIMEOUT = 2.0
STEPS = {
    "plan": "plan",
    "global plan": "plan",
    "write": "write",
    "commit": "write",
    "load metadata": "read metadata",
    "load plan": "plan",
    "load global plan": "plan",
    "read": "read",
}


def cases(faults: tuple[str, ...], places: tuple[str, ...]) -> list[Case]:
    return [
        Case(fault, place, rank)
        for fault in faults
        for place in places
        for rank in ((0,) if place in OF_THE_COORDINATOR else (0, 1))
    ]


SURVIVED = cases(("OSError", "unpicklable", "KeyboardInterrupt", "SystemExit"), SAVE_PLACES + LOAD_PLACES)
STOPPED = [case for case in cases(("SIGSTOP",), SAVE_PLACES + LOAD_PLACES) if case.place != "commit"]
LETHAL = [
    *cases(("SIGKILL",), (*SAVE_PLACES, "load plan", "read")),
    *cases(("_exit",), ("write",)),
]
CAUSES = {
    "OSError": "OSError: [Errno 5] on purpose",
    "unpicklable": "UnpicklableError: on purpose",
    "KeyboardInterrupt": "interrupted by KeyboardInterrupt",
    "SystemExit": "interrupted by SystemExit(3)",
    "SIGSTOP": "no sign of life for 2 s",
    "SIGKILL": "it died: its connection closed",
    "_exit": "it died: its connection closed",
}
Seen = dict[Case, list[tuple[Raised | None, float]]]


@pytest.fixture(scope="module")
def processes() -> RankProcesses:
    return rank_processes()


@pytest.fixture(scope="module")
def seen(processes: RankProcesses, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """All faults that a process survives, one after the other on one group."""
    folder = str(tmp_path_factory.mktemp("survived") / "c")
    everything = [*SURVIVED, *STOPPED]
    outcomes = processes.run(faulty.survive_in_sequence, WORLD, folder, everything, TIMEOUT, timeout=240)
    assert [outcome.kind for outcome in outcomes] == ["returned"] * WORLD, outcomes
    assert [outcome.stderr for outcome in outcomes] == [""] * WORLD
    return {case: [outcome.value[n] for outcome in outcomes] for n, case in enumerate(everything)}


def check_raised(case: Case, raised: Raised | None) -> None:
    assert raised is not None, "the call returned"
    assert raised.kind == "CheckpointException"
    assert raised.step == STEPS[case.place]
    assert list(raised.failures) == [case.rank]
    assert CAUSES[case.fault] in raised.failures[case.rank]
    assert raised.seconds < 30


@pytest.mark.parametrize("case", [*SURVIVED, *STOPPED], ids=str)
def test_a_fault_is_raised_on_all_ranks_with_its_cause_and_the_old_checkpoint_stays(
    case: Case, seen: Seen
) -> None:
    for rank, (raised, there) in enumerate(seen[case]):
        if rank == case.rank and case.fault in ("KeyboardInterrupt", "SystemExit"):
            assert raised is not None
            assert raised.kind == case.fault  # an interrupt stays an interrupt where it happened
        else:
            check_raised(case, raised)
        assert there == 1.0  # nothing of the failed save


@pytest.mark.parametrize("case", LETHAL, ids=str)
def test_a_rank_that_dies_is_named_on_all_others_and_they_go_on_without_it(
    case: Case, processes: RankProcesses, tmp_path: Path
) -> None:
    outcomes = processes.run(faulty.lose_a_rank, WORLD, str(tmp_path / "c"), case, 30.0)
    assert outcomes[case.rank].status != 0
    for rank, outcome in enumerate(outcomes):
        if rank != case.rank:
            assert outcome.kind == "returned", outcome.value
            raised, before, after = outcome.value
            check_raised(case, raised)
            assert (before, after) == (1.0, 3.0)
            assert outcome.stderr == ""


def test_slow_storage_is_not_taken_for_death(processes: RankProcesses, tmp_path: Path) -> None:
    outcomes = processes.run(faulty.write_slowly, 2, str(tmp_path / "c"), 0.5, 4.0)
    assert [(outcome.kind, outcome.value) for outcome in outcomes] == [("returned", 1.0)] * 2


def test_a_rank_that_holds_pythons_lock_for_long_is_not_taken_for_dead(
    processes: RankProcesses, tmp_path: Path
) -> None:
    outcomes = processes.run(faulty.hold_the_lock, 2, str(tmp_path / "c"), 0.8, 4.0)
    assert [(outcome.kind, outcome.value) for outcome in outcomes] == [("returned", 5.0)] * 2
