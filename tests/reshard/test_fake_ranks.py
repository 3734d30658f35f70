"""The fake group keeps its promises: failures reach all ranks, nobody waits in vain, nothing is shared."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import holdfast
from holdfast.errors import CheckpointException
from holdfast.testing import FakeRank, FakeRanks


def test_results_come_back_in_rank_order() -> None:
    assert FakeRanks(5).run(lambda rank: (rank.rank, rank.world_size)) == [(n, 5) for n in range(5)]


def test_the_coordinator_decides_for_all_in_rank_order() -> None:
    def work(rank: FakeRank) -> tuple[str, int, str]:
        mine = rank.open_exchange().decide(
            "count", lambda: rank.rank * 10, lambda parts: [f"{part} of {sum(parts)}" for part in parts]
        )
        total: int = rank.open_exchange().agree("sum", lambda: rank.rank, lambda parts: sum(parts, 0))
        shared = rank.open_exchange().share("tell", lambda: f"from {rank.rank}")
        return mine, total, shared

    assert FakeRanks(3).run(work) == [(f"{10 * n} of 30", 3, "from 0") for n in range(3)]


def test_a_failure_of_one_rank_is_raised_on_all() -> None:
    def fail_on_one(rank: FakeRank) -> None:
        def part() -> None:
            if rank.rank == 1:
                raise KeyError("mine")

        rank.open_exchange().agree("plan", part, lambda _: None)

    errors = FakeRanks(3).attempt(fail_on_one)
    for error in errors:
        assert isinstance(error, CheckpointException)
        assert isinstance(error, KeyError)
        assert error.step == "plan"
        assert list(error.failures) == [1]


def test_a_failure_of_the_decision_is_raised_on_all() -> None:
    def decide_badly(rank: FakeRank) -> None:
        rank.open_exchange().agree("plan", lambda: 1, lambda parts: parts[7])

    for error in FakeRanks(2).attempt(decide_badly):
        assert isinstance(error, IndexError)


def test_what_cannot_be_pickled_does_not_travel() -> None:
    def send_a_lock(rank: FakeRank) -> None:
        rank.open_exchange().agree("plan", threading.Lock, lambda _: None)

    for error in FakeRanks(2).attempt(send_a_lock):
        assert isinstance(error, CheckpointException)
        assert "pickle" in str(error)


def test_no_rank_sees_the_objects_of_another() -> None:
    def work(rank: FakeRank) -> bool:
        mine = [rank.rank]
        first = rank.open_exchange().agree("gather", lambda: mine, lambda parts: parts)
        mine.append(99)
        first[0].append(-1)
        again = rank.open_exchange().agree("gather", lambda: 0, lambda _: first)
        return again == [[0, -1], [1]]

    assert FakeRanks(2).run(work) == [True, True]


def test_nobody_waits_for_a_rank_that_has_ended() -> None:
    def leave_early(rank: FakeRank) -> None:
        if rank.rank == 2:
            return
        rank.open_exchange().agree("plan", lambda: 0, lambda _: None)

    *others, early = FakeRanks(3).attempt(leave_early)
    assert early is None
    for error in others:
        assert isinstance(error, CheckpointException)
        assert "rank 2 has ended" in str(error)


def test_nobody_waits_for_a_rank_that_left_its_exchange_by_an_exception() -> None:
    def leave(rank: FakeRank) -> str:
        try:
            with rank.open_exchange() as exchange:
                if rank.rank == 1:
                    raise ValueError("between two steps")
                exchange.agree("plan", lambda: 0, lambda _: None)
        except (ValueError, CheckpointException) as error:
            # The rank goes on, but not with this exchange.
            return str(error)
        return ""

    first, second = FakeRanks(2).run(leave)
    assert "rank 1 left with ValueError: between two steps" in first
    assert second == "between two steps"


def test_after_a_failed_step_all_further_ones_fail_and_the_next_exchange_works() -> None:
    def fail_once(rank: FakeRank) -> int:
        exchange = rank.open_exchange()
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                exchange.agree("plan", lambda: 1 // rank.rank, lambda _: None)
        return rank.open_exchange().agree("plan", lambda: rank.rank, lambda parts: max(parts) + 1)

    assert FakeRanks(2).run(fail_once) == [2, 2]


def test_an_interrupt_stays_one_and_the_others_hear_of_it() -> None:
    def interrupt(rank: FakeRank) -> None:
        def part() -> None:
            if rank.rank == 0:
                raise KeyboardInterrupt

        rank.open_exchange().agree("plan", part, lambda _: None)

    first, second = FakeRanks(2).attempt(interrupt)
    assert type(first) is KeyboardInterrupt
    assert isinstance(second, CheckpointException)
    assert "rank 0 ended with KeyboardInterrupt" in str(second)


def test_run_raises_what_went_wrong_first() -> None:
    def assert_on_one(rank: FakeRank) -> None:
        assert rank.rank != 1, "the real reason"
        rank.open_exchange().agree("plan", lambda: 0, lambda _: None)

    with pytest.raises(AssertionError, match="the real reason"):
        FakeRanks(2).run(assert_on_one)


def test_ranks_in_different_steps_are_told_so() -> None:
    def disagree(rank: FakeRank) -> None:
        rank.open_exchange().agree(["save", "load"][rank.rank], lambda: 0, lambda _: None)

    for error in FakeRanks(2).attempt(disagree):
        assert isinstance(error, CheckpointException)
        assert "rank 1 is in the step 'load' while others are in 'save'" in str(error)


def test_a_rank_that_does_not_come_is_given_up() -> None:
    given_up = threading.Event()

    def stay_away(rank: FakeRank) -> bool:
        if rank.rank == 1:
            # It keeps its turn all the time, as a rank does that computes for long.
            return given_up.wait(60)
        try:
            rank.open_exchange().agree("plan", lambda: 0, lambda _: None)
        finally:
            given_up.set()
        return False

    first, second = FakeRanks(2, timeout=0.05).attempt(stay_away)
    assert second is True
    assert isinstance(first, CheckpointException)
    assert "rank 1 did not come within 0.05 s" in str(first)


def test_operations_on_a_distributed_tensor_stay_on_its_rank() -> None:
    def work(rank: FakeRank) -> Any:
        value = rank.distribute(torch.arange(6.0), rank.mesh(), [Shard(0)])
        derived: Any = torch.zeros_like(torch.nn.Parameter(value).detach() * 2)
        return derived.device_mesh.get_coordinate()[0]

    assert FakeRanks(3).run(work) == [0, 1, 2]


def test_a_failing_writer_fails_the_save_on_all_ranks_and_commits_nothing(tmp_path: Path) -> None:
    class Broken(holdfast.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            raise OSError(28, "No space left on device")

    def save(rank: FakeRank) -> None:
        writer = Broken(tmp_path) if rank.rank == 1 else holdfast.FileSystemWriter(tmp_path)
        rank.save({f"{rank.rank}": torch.ones(2)}, storage_writer=writer)

    for error in FakeRanks(2).attempt(save):
        assert isinstance(error, OSError)
        assert error.errno == 28
    assert not (tmp_path / ".metadata").exists()


def test_stateful_objects_are_opened_and_given_their_state_back(tmp_path: Path) -> None:
    def save_and_load(rank: FakeRank) -> None:
        module = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(module.weight, 3.0)
        torch.nn.init.zeros_(module.bias)
        rank.save({"module": module}, checkpoint_id=tmp_path)
        other = torch.nn.Linear(2, 2)
        rank.load({"module": other}, checkpoint_id=tmp_path)
        assert bool((other.weight == 3.0).all())

    FakeRanks(2).run(save_and_load)
