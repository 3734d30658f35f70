"""The channel among strangers, forked children and few files: no save fails by them without saying why."""

from pathlib import Path

import pytest
from tests.ranks import channel_visitors
from tests.support.ranks import RankProcesses, rank_processes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def processes() -> RankProcesses:
    return rank_processes()


def test_more_idle_connections_than_files_do_not_make_a_save_fail(
    processes: RankProcesses, tmp_path: Path
) -> None:
    outcomes = processes.run(channel_visitors.save_among_visitors, 2, str(tmp_path / "c"), 256, 300)
    assert [outcome.value for outcome in outcomes] == [[None, None, 3.0]] * 2, outcomes
    assert [outcome.stderr for outcome in outcomes] == [""] * 2


def test_more_ranks_than_files_raise_with_the_limit_and_what_to_do(
    processes: RankProcesses, tmp_path: Path
) -> None:
    for outcome in processes.run(channel_visitors.save_with_few_files, 2, str(tmp_path / "c"), 40):
        raised, is_unchanged = outcome.value
        assert raised.step == "connect"
        assert list(raised.failures) == [0]
        assert "RLIMIT_NOFILE" in raised.failures[0]
        assert "ulimit -n" in raised.failures[0]
        assert is_unchanged


def test_a_save_does_not_raise_the_limit_of_files(processes: RankProcesses, tmp_path: Path) -> None:
    outcomes = processes.run(channel_visitors.save_with_few_files, 2, str(tmp_path / "c"), 100)
    assert [outcome.value for outcome in outcomes] == [(None, True)] * 2, outcomes


@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_a_rank_is_noticed_though_a_forked_child_of_it_lives(
    processes: RankProcesses, tmp_path: Path, rank: int
) -> None:
    outcomes = processes.run(channel_visitors.fork_and_die, 3, str(tmp_path / "c"), rank)
    assert outcomes[rank].kind == "ended"
    for outcome in outcomes[:rank] + outcomes[rank + 1 :]:
        assert outcome.kind == "returned", outcome
        raised, child_was_there = outcome.value
        assert "it died: its connection closed" in raised.failures[rank]
        assert raised.seconds < 30
        assert child_was_there
