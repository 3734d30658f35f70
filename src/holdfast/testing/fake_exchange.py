"""What the ranks of ``FakeRanks`` tell each other: an exchange in the memory of one process."""

import pickle
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from holdfast._ranks.exchange import Exchange
from holdfast.errors import CheckpointException, RemoteError, portable_failure

__all__ = ["FakeExchange", "Meeting"]

T = TypeVar("T")
R = TypeVar("R")

StepNumber: TypeAlias = tuple[int, int]
"""Which save or load of the group, and which step of it."""


class Meeting:
    """Where the ranks of one fake group meet, step by step; each rank comes on a thread of its own.

    Ranks take turns: only one works at a time, until it waits for others. Threads that all work at once
    mostly fight for the interpreter: 12 s of system time became 0.5.

    Args:
        world_size: How many ranks there are.
        timeout: Seconds to wait for the others before giving up. A guard against a test that hangs.
    """

    def __init__(self, world_size: int, timeout: float) -> None:
        self.world_size = world_size
        self._turn = threading.Lock()
        self._working: int | None = None
        self._timeout = timeout
        self._change = threading.Condition()
        self._gone: dict[int, str] = {}
        self._left: dict[tuple[int, int], str] = {}
        self._parts: dict[tuple[int, StepNumber], tuple[str, Any]] = {}
        self._answers: dict[tuple[int, StepNumber], Any] = {}

    def take_turn(self, rank: int) -> None:
        """Wait until no other rank works."""
        self._turn.acquire()
        self._working = rank

    def end_turn(self, rank: int) -> None:
        """Let another rank work; nothing happens if it is not this rank's turn."""
        if self._working == rank:
            self._working = None
            self._turn.release()

    def leave(self, rank: int, why: str) -> None:
        """Tell the others that they wait for this rank in vain, and let them work."""
        self.end_turn(rank)
        with self._change:
            self._gone[rank] = why
            self._change.notify_all()

    def leave_one(self, rank: int, series: int, why: str) -> None:
        """Tell the others that this rank will take no further step of one save or load."""
        with self._change:
            self._left[rank, series] = why
            self._change.notify_all()

    def bring(self, rank: int, number: StepNumber, step: str, part: Any) -> None:
        """Lay down what this rank brings to exchange ``number``."""
        with self._change:
            self._parts[rank, number] = (step, part)
            self._change.notify_all()

    def collect(self, collector: int, number: StepNumber, step: str) -> list[Any]:
        """What every rank brought to exchange ``number``, in rank order."""
        self.end_turn(collector)
        brought = [self._wait(self._parts, rank, number, step, giver=rank) for rank in range(self.world_size)]
        self.take_turn(collector)
        for rank, (their_step, _) in enumerate(brought):
            if their_step != step:
                raise _failed(step, rank, f"is in the step {their_step!r} while others are in {step!r}")
        return [part for _, part in brought]

    def answer(self, number: StepNumber, answers: Sequence[Any]) -> None:
        """Lay down an answer for each rank."""
        with self._change:
            self._answers.update({(rank, number): answer for rank, answer in enumerate(answers)})
            self._change.notify_all()

    def receive(self, rank: int, number: StepNumber, step: str, coordinator: int) -> Any:
        """The coordinator's answer for this rank, which has given up its turn when it gets it."""
        self.end_turn(rank)
        return self._wait(self._answers, rank, number, step, giver=coordinator)

    def _wait(self, shelf: dict[Any, Any], rank: int, number: StepNumber, step: str, giver: int) -> Any:
        """Take what lies for ``rank`` on the shelf, as soon as it lies there."""
        deadline = time.monotonic() + self._timeout
        with self._change:
            while (rank, number) not in shelf:
                # What a rank brought before it left still counts: it may be done while others are not.
                gone = self._left.get((giver, number[0])) or self._gone.get(giver)
                if gone:
                    raise _failed(step, giver, gone)
                if not self._change.wait(max(0, deadline - time.monotonic())):
                    raise _failed(step, giver, f"did not come within {self._timeout} s")
            return shelf.pop((rank, number))


def _failed(step: str, rank: int, why: str) -> CheckpointException:
    error = RemoteError(f"rank {rank} {why}", type_name="absent", rank=rank)
    return CheckpointException.of(step, {rank: (error, traceback.StackSummary())})


class FakeExchange(Exchange):
    """One rank's end of a :class:`Meeting`, for one save or one load.

    Whatever passes between ranks is pickled and unpickled, so that no rank sees another's objects, and what
    could not travel between processes does not travel here either. A failure of one rank is raised on all, as
    by the exchanges over a network. Nobody waits for a rank that has left or whose thread has ended.

    Args:
        meeting: Where the ranks meet.
        rank: This rank's number.
        series: The number of the save or load, the same on all ranks.
        coordinator_rank: The rank that decides.
    """

    def __init__(self, meeting: Meeting, rank: int, series: int = 0, coordinator_rank: int = 0) -> None:
        self.rank = rank
        self.world_size = meeting.world_size
        self.is_coordinator = rank == coordinator_rank
        self._coordinator = coordinator_rank
        self._meeting = meeting
        self._series = series
        self._steps = 0
        self._failure: CheckpointException | None = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave; whoever leaves by an exception tells the others."""
        if error is not None:
            self._meeting.leave_one(self.rank, self._series, f"left with {type(error).__name__}: {error}")

    def decide(self, step: str, part: Callable[[], T], decision: Callable[[list[T]], Sequence[R]]) -> R:
        """Every rank runs ``part``; the coordinator turns all parts, in rank order, into answers for all."""
        if self._failure is not None:
            raise self._failure
        try:
            return self._decide(step, part, decision)
        except CheckpointException as failure:
            self._failure = failure
            raise

    def _decide(self, step: str, part: Callable[[], T], decision: Callable[[list[T]], Sequence[R]]) -> R:
        number = (self._series, self._steps)
        self._steps += 1
        self._meeting.bring(self.rank, number, step, _attempt(part))
        if self.is_coordinator:
            try:
                answers = self._answers_to(self._meeting.collect(self.rank, number, step), decision)
            except CheckpointException as absent:
                answers = [("failed", pickle.dumps(absent.failures))] * self.world_size
            self._meeting.answer(number, answers)
        kind, value = self._meeting.receive(self.rank, number, step, self._coordinator)
        received = pickle.loads(value)
        if kind == "failed":
            # Without waiting for a turn: the rank that has it may be the one that does not come.
            raise CheckpointException.of(step, received)
        self._meeting.take_turn(self.rank)
        return received  # type: ignore[no-any-return]

    def _answers_to(self, parts: list[Any], decision: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
        failures = {rank: pickle.loads(value) for rank, (kind, value) in enumerate(parts) if kind == "failed"}
        if not failures:
            decided: list[Any] = []
            outcome = _attempt(
                lambda: decided.extend(
                    pickle.dumps(answer) for answer in decision([pickle.loads(value) for _, value in parts])
                )
            )
            if outcome[0] == "done":
                return [("done", answer) for answer in decided]
            failures = {self.rank: pickle.loads(outcome[1])}
        return [("failed", pickle.dumps(failures))] * self.world_size


def _attempt(work: Callable[[], Any]) -> tuple[str, bytes]:
    """What ``work`` gave or raised, pickled; interrupts pass."""
    try:
        return "done", pickle.dumps(work())
    except Exception as error:  # noqa: BLE001 - whatever it is, every rank shall learn of it
        failure = (error, traceback.extract_tb(error.__traceback__))
        return "failed", pickle.dumps(portable_failure(failure))
