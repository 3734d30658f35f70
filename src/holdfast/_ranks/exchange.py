"""The exchanges of a save or a load: every rank does its part of a step, one decides, all learn the outcome.

A step either succeeds on every rank or raises the same :class:`CheckpointException` on every rank.
Interrupts (KeyboardInterrupt, SystemExit) are not failures of a step: the rank that they happen to raises
them unchanged, and the others raise a CheckpointException that says that this rank was interrupted.
"""

import abc
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

from typing_extensions import Self

from holdfast._ranks.broadcast import Broadcast
from holdfast.errors import CheckpointException

T = TypeVar("T")
R = TypeVar("R")


def do_nothing() -> None:
    """The check of whoever has no reason to give up waiting."""


class Exchange(abc.ABC):
    """This process's place among the ranks of one save or load.

    An exchange serves one save or one load, in a with-block; all ranks take the same steps in the same
    order. If a rank leaves the block by an exception, the next step of the others fails at once. After a
    failed step every further step raises the same failure. To implement an exchange (to run many ranks in
    one process, say), give it the first four attributes and :meth:`decide`.

    Attributes:
        rank: This rank's number in the group.
        world_size: How many ranks there are.
        group_size: How many ranks the group has, whether or not they take part.
        is_coordinator: Whether this rank decides.
        outcome_is_known: False after a step that raised here although the coordinator may have decided it, or
            may still do so: this rank had done its part, and then was interrupted or lost the coordinator.
            The files that it has written may be part of a checkpoint and must not be removed.
        can_broadcast: Whether it has :meth:`open_broadcast`. If not, each rank reads for itself.
    """

    rank: int
    world_size: int
    group_size: int
    is_coordinator: bool
    outcome_is_known: bool = True
    can_broadcast: bool = False

    @abc.abstractmethod
    def decide(self, step: str, part: Callable[[], T], decision: Callable[[list[T]], Sequence[R]]) -> R:
        """Every rank runs ``part``; the coordinator turns all parts, in rank order, into answers for all.

        ``decision`` runs on the coordinator only, once every rank has done its part; it returns one answer
        for each rank. Parts and answers must pickle; those of the coordinator itself are passed as they
        are. Both may take any time.

        Raises:
            CheckpointException: A part failed on some ranks, the decision failed, or a rank was lost; the
                same on every rank.
        """

    def agree(self, step: str, part: Callable[[], T], decision: Callable[[list[T]], R]) -> R:
        """Do as ``decide``, with the same answer for every rank."""
        return self.decide(step, part, lambda parts: [decision(parts)] * self.world_size)

    def share(self, step: str, produce: Callable[[], R]) -> R:
        """The coordinator runs ``produce``; every rank gets what it returns, or raises what it raised.

        The coordinator may run it before the others have come to this step.
        """
        return self.agree(step, lambda: None, lambda _: produce())

    def open_broadcast(self, members: Sequence[int], check: Callable[[], None] = do_nothing) -> Broadcast:
        """Connect some ranks to send bulk bytes to each other; all of them call it, in the part of a step.

        Args:
            members: At least two ranks, in the same order on all of them; this rank is one of them.
            check: Called while nothing is sent or received; it may raise to give up waiting.

        Raises:
            CheckpointException: A member is lost before all have come.
        """
        raise NotImplementedError

    def confirm(self) -> None:  # noqa: B027 - nobody else can give up what a process does alone
        """Raise if a rank has taken the coordinator for dead, which calls this directly before it commits.

        It costs one turn of the channel's thread, about 0.1 ms, and no message. It does not help if the
        process is stopped between this call and the commit itself.

        Raises:
            CheckpointException: As it was raised on the other ranks.
        """

    def others_at_work(self) -> bool:
        """On the coordinator, after a step that failed: whether other ranks may still be doing their part.

        So it is if this rank was interrupted, or did not wait any longer for a rank after another had failed.
        """
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:  # noqa: B027
        """Leave the exchange; a rank that leaves by an exception tells the others."""


class Alone(Exchange):
    """The exchange of a single process, which is its own coordinator."""

    def __init__(self, rank: int = 0, group_size: int = 1) -> None:
        self.rank = rank
        self.group_size = group_size
        self.world_size = 1
        self.is_coordinator = True

    def decide(self, step: str, part: Callable[[], T], decision: Callable[[list[T]], Sequence[R]]) -> R:
        """Run ``part``, then ``decision``."""
        try:
            return decision([part()])[0]
        except Exception as error:
            failure = (error, traceback.extract_tb(error.__traceback__))
            raise CheckpointException.of(step, {self.rank: failure}) from error
