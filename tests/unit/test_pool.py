"""Jobs on threads: every failure reaches the caller, and no thread outlives the call."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from holdfast._io.pool import Budget, Cancellation, JobCancelledError, run
from holdfast.errors import UsageError

WAIT = 20.0  # a deadline for tests that hang; nothing waits for it when things work


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("threads", [0, 1, 3, 50])
def test_results_come_in_the_order_of_the_jobs(threads: int) -> None:
    assert run([partial(pow, n, 2) for n in range(20)], threads=threads) == [n * n for n in range(20)]
    assert run([], threads=threads) == []


def test_jobs_run_at_the_same_time() -> None:
    meet = threading.Barrier(3, timeout=WAIT)
    assert sorted(run([meet.wait] * 3, threads=3)) == [0, 1, 2]


@pytest.mark.parametrize(("threads", "jobs"), [(1, 5), (8, 1)])
def test_one_thread_or_one_job_needs_no_thread(threads: int, jobs: int) -> None:
    assert run([threading.current_thread] * jobs, threads=threads) == [threading.current_thread()] * jobs


class _OddError(BaseException):
    pass


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", [ValueError, OSError, MemoryError, SystemExit, KeyboardInterrupt, _OddError])
def test_a_failure_of_any_kind_is_raised_itself(kind: type[BaseException], threads: int) -> None:
    failure = kind("broken")

    def fail() -> None:
        raise failure

    with pytest.raises(kind) as caught:
        run([lambda: None, fail, lambda: None], threads=threads)
    assert caught.value is failure


@pytest.mark.parametrize("threads", [1, 2])
def test_after_a_failure_no_job_is_started(threads: int) -> None:
    started: list[int] = []
    flag = Cancellation()

    def job(n: int) -> None:
        started.append(n)
        if n == 1:
            raise ValueError(n)
        if n == 0 and threads == 2:
            _wait_for(flag)

    with pytest.raises(ValueError, match="1"):
        run([partial(job, n) for n in range(100)], threads=threads, cancellation=flag)
    assert sorted(started) == [0, 1]


def test_running_jobs_are_waited_for() -> None:
    flag, done, all_run = Cancellation(), [], threading.Barrier(3, timeout=WAIT)

    def slow() -> None:
        all_run.wait()
        _wait_for(flag)
        done.append("slow")

    def fail() -> None:
        all_run.wait()
        raise ValueError

    with pytest.raises(ValueError):
        run([slow, fail, slow], threads=3, cancellation=flag)
    assert done == ["slow", "slow"]


def test_later_failures_are_in_the_notes_of_the_first() -> None:
    flag, both_run = Cancellation(), threading.Barrier(2, timeout=WAIT)

    def first() -> None:
        both_run.wait()
        raise ValueError("first")

    def second() -> None:
        both_run.wait()
        _wait_for(flag)
        raise OSError(28, "second")

    with pytest.raises(ValueError, match="first") as caught:
        run([second, first], threads=2, cancellation=flag)
    assert ["second" in note for note in getattr(caught.value, "__notes__", [])] == [True]


def test_a_long_job_stops_within_one_step_of_a_failure_elsewhere() -> None:
    flag, steps, two_done = Cancellation(), [], threading.Event()

    def long() -> None:
        for step in range(1000):
            flag.check()
            steps.append(step)
            if step == 1:
                two_done.set()
                _wait_for(flag)

    def fail() -> None:
        two_done.wait(WAIT)
        raise ValueError("elsewhere")

    with pytest.raises(ValueError, match="elsewhere") as caught:
        run([long, fail], threads=2, cancellation=flag)
    assert steps == [0, 1]
    assert not hasattr(caught.value, "__notes__"), "a job that was cancelled did not fail"


def test_a_flag_that_somebody_else_raised_is_not_taken_for_success() -> None:
    flag = Cancellation()
    for threads in (1, 2):
        with pytest.raises(JobCancelledError):
            run([flag.cancel, flag.check, flag.check], threads=threads, cancellation=flag)


def test_an_interrupt_of_the_caller_cancels_and_is_raised() -> None:
    flag, both_run = Cancellation(), threading.Barrier(2, timeout=WAIT)
    stopped: list[threading.Thread] = []

    def job() -> None:
        if both_run.wait() == 0:
            os.kill(os.getpid(), signal.SIGINT)
        _wait_for(flag)
        stopped.append(threading.current_thread())

    # A program that a script started in the background ignores interrupts from the start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run([job, job, job, job], threads=2, cancellation=flag)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(stopped) == 2
    assert threading.current_thread() not in stopped


def test_jobs_never_hold_more_than_the_budget() -> None:
    budget, seen = Budget(100), []

    def job(nbytes: int) -> None:
        with budget.hold(nbytes):
            seen.append(budget.held)

    run([partial(job, n) for n in [30, 60, 1, 100, 45, 45, 45] * 30], threads=8)
    assert len(seen) == 210
    assert max(seen) <= 100
    assert budget.held == 0


def test_a_request_larger_than_the_budget_is_admitted_alone() -> None:
    budget, alone = Budget(10), []

    def large() -> None:
        with budget.hold(1000):
            alone.append(budget.held)

    def small() -> None:
        with budget.hold(10):
            assert budget.held <= 10

    run([small, large, small, large, small, small] * 20, threads=4)
    assert alone == [1000] * 40


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    budget, order = Budget(10), []

    def ask(nbytes: int) -> None:
        with budget.hold(nbytes):
            order.append(nbytes)

    large = threading.Thread(target=ask, args=(10,))
    small = threading.Thread(target=ask, args=(1,))
    with budget.hold(5):
        large.start()
        while not budget._waiting:
            pass
        small.start()
        while len(budget._waiting) < 2:
            pass
    for thread in (large, small):
        thread.join(WAIT)
    assert order == [10, 1]


def test_a_failure_wakes_those_who_wait_for_the_budget() -> None:
    flag = Cancellation()
    budget = Budget(10, flag)

    def wait() -> None:
        with budget.hold(1):
            pytest.fail("admitted after the failure")

    def fail() -> None:
        while len(budget._waiting) < 2:
            pass
        raise ValueError("elsewhere")

    with budget.hold(10):
        with pytest.raises(ValueError, match="elsewhere"):
            run([wait, wait, fail], threads=3, cancellation=flag)
        assert budget.held == 10


def test_what_a_failing_job_held_is_released() -> None:
    budget = Budget(10)
    with pytest.raises(ValueError), budget.hold(7):
        raise ValueError
    assert budget.held == 0
    with pytest.raises(UsageError):
        Budget(0)


def _wait_for(flag: Cancellation) -> None:
    with flag.changed:
        assert flag.changed.wait_for(lambda: flag.cancelled, timeout=WAIT)


def test_an_interrupt_that_keeps_a_thread_from_working_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    # A handler of a signal that raises inside of Thread.start makes Python forget the new thread, which dies.
    forgotten: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", forgotten.append)
    bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def die(thread: threading.Thread) -> None:
        thread.run = lambda: None  # type: ignore[method-assign]
        bootstrap(thread)

    start = threading.Thread.start

    def start_and_interrupt(thread: threading.Thread) -> None:
        start(thread)
        raise TimeoutError("from a handler")

    monkeypatch.setattr(threading.Thread, "_bootstrap_inner", die)
    monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
    with pytest.raises(TimeoutError, match="from a handler"):
        run([lambda: None] * 3, threads=2)
