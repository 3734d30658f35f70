"""The messages between the ranks of ``FakeRanks``, in the memory of one process."""

import pickle
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from holdfast._ranks.exchange import Exchange
from holdfast.errors import CheckpointException, RemoteError, portable_failure

__all__ = ["FakeExchange", "FakeGroup"]

T = TypeVar("T")
R = TypeVar("R")

StepNumber: TypeAlias = tuple[int, int]
"""Which save or load of the group, and which step of it."""


class FakeGroup:
    """The ranks of one ``FakeRanks``, each on its own thread, and the messages that wait for them.

    Ranks take turns: one rank works until it waits for others. If all threads worked at once, they would
    mostly wait for the interpreter's lock: with turns 12 s of system time became 0.5.

    Args:
        world_size: How many ranks there are.
        timeout: Seconds after which a rank stops waiting for another and raises, so that no test hangs.
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
        """Let another rank work. Does nothing if it is not this rank's turn."""
        if self._working == rank:
            self._working = None
            self._turn.release()

    def leave(self, rank: int, why: str) -> None:
        """Say that this rank has ended: ranks that wait for it raise with ``why``."""
        self.end_turn(rank)
        with self._change:
            self._gone[rank] = why
            self._change.notify_all()

    def leave_one(self, rank: int, series: int, why: str) -> None:
        """Say that this rank has left one save or load: ranks that wait for it there raise with ``why``."""
        with self._change:
            self._left[rank, series] = why
            self._change.notify_all()

    def submit(self, rank: int, number: StepNumber, step: str, part: Any) -> None:
        """Store this rank's part of step ``number`` for the coordinator."""
        with self._change:
            self._parts[rank, number] = (step, part)
            self._change.notify_all()

    def collect(self, collector: int, number: StepNumber, step: str) -> list[Any]:
        """Wait for every rank's part of step ``number``; they come in rank order."""
        self.end_turn(collector)
        found = [self._wait(self._parts, rank, number, step, sender=rank) for rank in range(self.world_size)]
        self.take_turn(collector)
        for rank, (their_step, _) in enumerate(found):
            if their_step != step:
                raise _failed(step, rank, f"is in the step {their_step!r} while others are in {step!r}")
        return [part for _, part in found]

    def answer(self, number: StepNumber, answers: Sequence[Any]) -> None:
        """Store the coordinator's answer for each rank."""
        with self._change:
            self._answers.update({(rank, number): answer for rank, answer in enumerate(answers)})
            self._change.notify_all()

    def receive(self, rank: int, number: StepNumber, step: str, coordinator: int) -> Any:
        """Wait for the coordinator's answer for this rank. This ends the rank's turn."""
        self.end_turn(rank)
        return self._wait(self._answers, rank, number, step, sender=coordinator)

    def _wait(self, messages: dict[Any, Any], rank: int, number: StepNumber, step: str, sender: int) -> Any:
        """Take the message of step ``number`` for ``rank`` out of ``messages`` as soon as it is there."""
        deadline = time.monotonic() + self._timeout
        with self._change:
            while (rank, number) not in messages:
                # A message that a rank sent before it left still counts: it may be done while others are not.
                gone = self._left.get((sender, number[0])) or self._gone.get(sender)
                if gone:
                    raise _failed(step, sender, gone)
                if not self._change.wait(max(0, deadline - time.monotonic())):
                    raise _failed(step, sender, f"did not come within {self._timeout} s")
            return messages.pop((rank, number))


def _failed(step: str, rank: int, why: str) -> CheckpointException:
    error = RemoteError(f"rank {rank} {why}", type_name="absent", rank=rank)
    return CheckpointException.of(step, {rank: (error, traceback.StackSummary())})


class FakeExchange(Exchange):
    """One rank's end of a :class:`FakeGroup`, for one save or one load.

    Every message is pickled and unpickled, so that no rank sees another rank's objects, and an object that
    cannot be sent between processes cannot be sent here either. A failure of one rank is raised on all, as
    in exchanges over a network. No rank waits for one that has left or whose thread has ended.

    Args:
        group: The ranks that exchange.
        rank: This rank's number.
        series: The number of the save or load, the same on all ranks.
        coordinator_rank: The rank that decides.
    """

    def __init__(self, group: FakeGroup, rank: int, series: int = 0, coordinator_rank: int = 0) -> None:
        self.rank = rank
        self.world_size = self.group_size = group.world_size
        self.is_coordinator = rank == coordinator_rank
        self._coordinator = coordinator_rank
        self._group = group
        self._series = series
        self._steps = 0
        self._failure: CheckpointException | None = None

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave. If an exception is the reason, tell the other ranks."""
        if error is not None:
            self._group.leave_one(self.rank, self._series, f"left with {type(error).__name__}: {error}")

    def decide(self, step: str, part: Callable[[], T], decision: Callable[[list[T]], Sequence[R]]) -> R:
        """Run ``part`` on every rank; ``decision``, on the coordinator, turns all parts into all answers."""
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
        self._group.submit(self.rank, number, step, _attempt(part))
        if self.is_coordinator:
            try:
                answers = self._answers_to(self._group.collect(self.rank, number, step), decision)
            except CheckpointException as absent:
                answers = [("failed", pickle.dumps(absent.failures))] * self.world_size
            self._group.answer(number, answers)
        kind, value = self._group.receive(self.rank, number, step, self._coordinator)
        received = pickle.loads(value)
        if kind == "failed":
            # Without waiting for a turn: the rank that has it may be the one that does not come.
            raise CheckpointException.of(step, received)
        self._group.take_turn(self.rank)
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
    """Run ``work``; its result or its exception, pickled. Interrupts are not caught."""
    try:
        return "done", pickle.dumps(work())
    except Exception as error:  # noqa: BLE001 - whatever it is, every rank must learn of it
        failure = (error, traceback.extract_tb(error.__traceback__))
        return "failed", pickle.dumps(portable_failure(failure))
