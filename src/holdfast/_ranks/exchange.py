"""The exchanges of a save or a load: every rank does its part of a step, one decides, all learn the outcome.

A step either succeeds on every rank or raises the same :class:`CheckpointException` on every rank.
Interrupts (KeyboardInterrupt, SystemExit) are not failures of a step: they pass through as they are.
"""

import abc
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from holdfast.errors import WRAPPED_EXCEPTION, CheckpointException, portable_failure

__all__ = ["Alone", "Exchange", "Group", "open_exchange"]

T = TypeVar("T")
R = TypeVar("R")


class Exchange(abc.ABC):
    """This process's place among the ranks of one save or load.

    Attributes:
        rank: This rank's number in the group.
        world_size: How many ranks there are.
        is_coordinator: Whether this rank decides.
    """

    rank: int
    world_size: int
    is_coordinator: bool

    @abc.abstractmethod
    def decide(self, step: str, part: Callable[[], T], decision: Callable[[list[T]], Sequence[R]]) -> R:
        """Every rank runs ``part``; the coordinator turns all parts, in rank order, into answers for all."""

    def agree(self, step: str, part: Callable[[], T], decision: Callable[[list[T]], R]) -> R:
        """As ``decide``, with the same answer for every rank."""
        return self.decide(step, part, lambda parts: [decision(parts)] * self.world_size)


class Alone(Exchange):
    """A single process: its own coordinator."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.world_size = 1
        self.is_coordinator = True

    def decide(self, step: str, part: Callable[[], T], decision: Callable[[list[T]], Sequence[R]]) -> R:
        """Both in turn, here."""
        try:
            return decision([part()])[0]
        except Exception as error:
            failure = (error, traceback.extract_tb(error.__traceback__))
            raise CheckpointException.of(step, {self.rank: failure}) from error


class Group(Exchange):
    """The ranks of a process group, over its own collectives."""

    def __init__(self, group: dist.ProcessGroup | None, coordinator_rank: int = 0) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.coordinator = coordinator_rank
        self.is_coordinator = self.rank == coordinator_rank

    def decide(self, step: str, part: Callable[[], T], decision: Callable[[list[T]], Sequence[R]]) -> R:
        """Gather, decide, tell."""
        mine = _attempt(part)
        parts: list[Any] | None = [None] * self.world_size if self.is_coordinator else None
        root = dist.get_global_rank(self.group, self.coordinator) if self.group else self.coordinator
        dist.gather_object(mine, parts, dst=root, group=self.group)
        answers: list[Any] = [None] * self.world_size
        if self.is_coordinator:
            assert parts is not None
            answers = self._answers(parts, decision)
        mine_back: list[Any] = [None]
        dist.scatter_object_list(
            mine_back, answers if self.is_coordinator else None, src=root, group=self.group
        )
        kind, value = mine_back[0]
        if kind == "failed":
            raise CheckpointException.of(step, value)
        return value  # type: ignore[no-any-return]

    def _answers(self, parts: list[Any], decision: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
        failures = {rank: value for rank, (kind, value) in enumerate(parts) if kind == "failed"}
        if not failures:
            kind, decided = _attempt(lambda: decision([value for _, value in parts]))
            if kind == "done":
                return [("done", answer) for answer in decided]
            failures = {self.rank: decided}
        return [("failed", failures)] * self.world_size


def _attempt(work: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "done", work()
    except Exception as error:  # noqa: BLE001 - whatever it is, every rank shall learn of it
        failure: WRAPPED_EXCEPTION = (error, traceback.extract_tb(error.__traceback__))
        return "failed", portable_failure(failure)


def open_exchange(group: dist.ProcessGroup | None, *, no_dist: bool, coordinator_rank: int = 0) -> Exchange:
    """The exchange among the ranks of ``group``, or of nobody."""
    if no_dist or not dist.is_available() or not dist.is_initialized():
        return Alone()
    return Group(group, coordinator_rank)
