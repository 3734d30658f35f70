"""The coordinator's record of every save and load under way: which rank has done what, and which is missing.

It has no sockets, no threads and no clock: messages and losses go in, and failures to be told come out.

A session is one save or load; a step is one exchange in it. The coordinator gathers a step until every rank
has delivered its part, and then decides it. From that moment on the loss of a rank does not fail the step:
every part is there, and whether a checkpoint is committed must not depend on which rank died meanwhile. The
loss fails the next step. There is one exception: a rank that took the coordinator itself for dead, and
raised, fails the step also while it is being decided (:attr:`Session.given_up`).
"""

import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from holdfast._ranks.failures import (
    EVERY_RANK,
    Failures,
    PackedFailure,
    SessionFailure,
    lost_rank,
    silent_rank,
)
from holdfast._ranks.messages import Segments
from holdfast.errors import UsageError

# The part of a timeout that the coordinator waits for other parts after one has failed, so that all
# failures of a step are raised together.
_GRACE = 0.25


class Label(NamedTuple):
    """What a rank says it is doing.

    Attributes:
        purpose: ``"save"`` or ``"load"``.
        step: The name of the step.
        timeout: After how many seconds of silence this rank takes another for dead.
    """

    purpose: str
    step: str
    timeout: float


Outcome: TypeAlias = Segments | PackedFailure | None
"""What a rank has delivered: its part, or why it failed; None for the part of the coordinator itself."""


def different_calls(rank: int, label: Label, others: Label) -> PackedFailure:
    """Return the failure of ranks that do not make the same calls."""
    error = UsageError(
        f"rank {rank} is at step {label.step!r} of a {label.purpose} while others are at step "
        f"{others.step!r} of a {others.purpose}: all ranks of a group must make the same calls in the same "
        "order",
        rank=rank,
    )
    return PackedFailure.of((error, traceback.StackSummary()))


@dataclass
class Session:
    """One save or load.

    Attributes:
        missing: The ranks that have neither done their part of the step nor failed to.
        step: The number of the step that is being gathered or decided.
        label: The label of the first rank that delivered a part of the step.
        concluded: The label of the step before; None in the first one.
        parts: By rank, the parts of the step that have been delivered; the coordinator's own is None.
        failed_parts: By rank, the failures that have been delivered in place of parts.
        is_deciding: Whether all parts are there and the coordinator is deciding.
        expected: The label of the first rank that waits for others without having done its part.
        failure: Why the session has failed; None while it has not.
        given_up: Why some rank has taken the coordinator for dead; None while none has.
        deadline: When the session fails because a part has failed, even if other parts are missing.
        ended: The ranks that have left the session.
        later: What fails the session as soon as the step that is being decided is concluded.
        begun: The ranks that are known to have begun the session.
        is_watched: Whether ranks that do not begin the session will be asked for.
    """

    missing: set[int]
    step: int = 0
    label: Label | None = None
    concluded: Label | None = None
    parts: dict[int, Segments | None] = field(default_factory=dict)
    failed_parts: Failures = field(default_factory=dict)
    is_deciding: bool = False
    expected: Label | None = None
    failure: SessionFailure | None = None
    given_up: SessionFailure | None = None
    deadline: float | None = None
    ended: set[int] = field(default_factory=set)
    later: list[SessionFailure] = field(default_factory=list)
    begun: set[int] = field(default_factory=set)
    is_watched: bool = False


class Ledger:
    """All sessions under way.

    Args:
        world_size: The number of ranks.
        failed: Called with a session's number and failure when it fails. The third argument is None then,
            or the one rank that must be told because it came later.
    """

    def __init__(self, world_size: int, failed: Callable[[int, SessionFailure, int | None], None]) -> None:
        self._ranks = frozenset(range(world_size))
        self._failed = failed
        self._sessions: dict[int, Session] = {}
        self._lost: dict[int, str] = {}  # why

    def session(self, number: int) -> Session:
        """Return the session of that number; the first call opens it."""
        if number not in self._sessions:
            self._sessions[number] = Session(missing=set(self._ranks))
        return self._sessions[number]

    def deliver(
        self, number: int, step: int, rank: int, label: Label, outcome: Outcome, now: float
    ) -> float | None:
        """Record that a rank has done its part, or failed to.

        Returns:
            When to call :meth:`check_deadlines`; None if there is no need to.
        """
        session = self._enter(number, step, rank, label)
        if session is None:
            return None
        session.label = session.label or label
        session.missing.discard(rank)
        if isinstance(outcome, PackedFailure):
            session.failed_parts[rank] = outcome
            session.deadline = session.deadline or now + _GRACE * label.timeout
        else:
            session.parts[rank] = outcome
        self._decide_or_fail(number, session, now)
        return session.deadline

    def expect(self, number: int, step: int, rank: int, label: Label, now: float) -> None:
        """Record that a rank waits for others, without having done its part or in the middle of it."""
        if step < self.session(number).step:
            return  # the message came late; what the rank waits for is on its way
        session = self._enter(number, step, rank, label)
        if session is not None:
            session.expected = session.expected or label
            self._decide_or_fail(number, session, now)

    def _enter(self, number: int, step: int, rank: int, label: Label) -> Session | None:
        """Return the session if it has not failed and all ranks in it are at the same step."""
        session = self.session(number)
        session.begun.add(rank)
        if session.failure is not None:
            self._failed(number, session.failure, rank)
            return None
        # A rank that comes late, with something else, learns what the others have done meanwhile.
        before = session.concluded if step < session.step else None
        there = session.label or session.expected or before or label
        if (step, label.purpose, label.step) == (session.step, there.purpose, there.step):
            return session
        self._fail_after_decision(
            number, SessionFailure(label.step, {rank: different_calls(rank, label, there)})
        )
        return None

    def conclude(self, number: int) -> None:
        """Begin the next step: the coordinator has told all ranks the outcome of this one."""
        session = self.session(number)
        session.step += 1
        session.concluded = session.label or session.expected
        session.label = session.expected = None
        session.missing = set(self._ranks)
        session.parts, session.failed_parts, session.deadline = {}, {}, None
        session.is_deciding = False
        for failure in session.later:
            self.fail(number, failure)

    def leave(self, number: int, rank: int, failure: SessionFailure) -> None:
        """Record that a rank has left in the middle: interrupted, or by an error between two steps."""
        self._fail_after_decision(number, failure)
        self.end(number, rank)

    def give_up(self, number: int, failure: SessionFailure) -> None:
        """Record that a rank took the coordinator for dead, and has raised."""
        self.session(number).given_up = failure
        self._fail_after_decision(number, failure)

    def lose(self, rank: int, reason: str, now: float) -> None:
        """Record that a rank's connection is gone."""
        self._lost[rank] = reason
        self.check_deadlines(now)

    def find(self, rank: int) -> None:
        """Record that a rank has connected again."""
        self._lost.pop(rank, None)

    def silence(self, rank: int) -> None:
        """Fail every session that waits for a rank which has given no sign of life."""
        for number, missing, label in list(self.waiting()):
            if rank in missing:
                self.fail(number, SessionFailure(label.step, silent_rank(rank, label.timeout)))

    def fail(self, number: int, failure: SessionFailure) -> None:
        """End the session for all ranks; nothing happens if it has failed already."""
        session = self.session(number)
        if session.failure is None:
            session.failure = failure
            session.is_deciding = False
            session.parts.clear()
            self._failed(number, failure, None)

    def _fail_after_decision(self, number: int, failure: SessionFailure) -> None:
        """Fail the session, but let a step be concluded that is being decided."""
        session = self.session(number)
        if session.is_deciding:
            session.later.append(failure)
        else:
            self.fail(number, failure)

    def end(self, number: int, rank: int) -> None:
        """Record that a rank has left the session; when all have, the session is forgotten."""
        session = self._sessions.get(number)
        if session is not None:
            session.ended.add(rank)
            if session.ended >= self._ranks:
                del self._sessions[number]
            else:
                self._decide_or_fail(number, session, -math.inf)

    def has_begun(self, number: int, rank: int) -> None:
        """Record that a rank has begun the session, although it has done nothing in it yet."""
        if number in self._sessions:
            self._sessions[number].begun.add(rank)

    def absent(self, number: int) -> tuple[list[int], Label | None]:
        """Return the ranks that have not begun a session, and the label of those who wait, if any do.

        If the session is over, there are no such ranks.
        """
        session = self._sessions.get(number)
        if session is None or session.failure is not None:
            return [], None
        return sorted(self._ranks - session.begun), session.label or session.expected

    def at_work(self, number: int) -> set[int]:
        """Return the ranks that may still be doing their part of the step, also if the session has failed."""
        session = self.session(number)
        return session.missing - session.ended - self._lost.keys()

    def waiting(self) -> Iterator[tuple[int, set[int], Label]]:
        """Yield the sessions in which some rank waits: the number, the missing ranks, and the label."""
        for number, session in self._sessions.items():
            label = session.label or session.expected
            if label is not None and session.failure is None and not session.is_deciding:
                yield number, session.missing, label

    def check_deadlines(self, now: float) -> None:
        """Fail the sessions that have waited long enough for other parts after one had failed."""
        for number, session in list(self._sessions.items()):
            self._decide_or_fail(number, session, now)

    def _decide_or_fail(self, number: int, session: Session, now: float) -> None:
        """See whether the step can be decided, or must fail."""
        label = session.label or session.expected
        if session.failure is not None or session.is_deciding or label is None:
            return
        missing = session.missing
        lost: Failures = {}
        for rank in missing & self._lost.keys():
            reason = self._lost[rank]
            if rank not in session.begun:
                # Mostly it has ended as it should, and only some of the ranks call.
                reason += f" before it sent anything for this {label.purpose}: {EVERY_RANK}"
            lost.update(lost_rank(rank, reason))
        for rank in missing & session.ended:
            lost.update(lost_rank(rank, f"it has left the {label.purpose} before this step"))
        is_late = session.deadline is not None and now >= session.deadline
        if lost or is_late or (not missing and session.failed_parts):
            self.fail(number, SessionFailure(label.step, {**session.failed_parts, **lost}))
        elif not missing:
            session.is_deciding = True
