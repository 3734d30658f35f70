"""The coordinator's account of every save and load that is open: who has done what, and who is missing.

No sockets, no threads, no clock of its own: frames and losses go in, and what is to be told comes out.

A session is one save or load, a step is one exchange in it. A step is gathered until every rank has
delivered its part; then it is being decided, and from that moment on no loss of a rank fails it: every
part is there, and whether a checkpoint is committed must not depend on who died while it was. The loss
fails the next step. Only a rank that took the coordinator itself for dead, and raised, is heeded also
then (:attr:`Session.given_up`).
"""

import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast._ranks.failures import Failures, Verdict, lost_rank, silent_rank
from holdfast._ranks.frames import Segments
from holdfast.errors import WRAPPED_EXCEPTION, UsageError

__all__ = ["Label", "Ledger", "Session", "unlike"]

# Of a timeout: how long the parts of the others are waited for after one has failed, so that all failures
# of a step are raised together.
_GRACE = 0.25


class Label(NamedTuple):
    """What a rank says it is doing.

    Attributes:
        purpose: ``"save"`` or ``"load"``.
        step: The name of the step.
        timeout: After how many seconds of silence this rank gives another up.
    """

    purpose: str
    step: str
    timeout: float


def unlike(rank: int, label: Label, others: Label) -> UsageError:
    """The error of ranks that do not do the same."""
    return UsageError(
        f"rank {rank} is at step {label.step!r} of a {label.purpose} while others are at step "
        f"{others.step!r} of a {others.purpose}: all ranks of a group must make the same calls in the same "
        "order",
        rank=rank,
    )


@dataclass
class Session:
    """One save or load.

    Attributes:
        missing: The ranks that have not done their part of the step yet, nor failed to.
        step: The number of the step that is being gathered or decided.
        label: What it is, as the first rank to come said.
        parts: The parts of it that have been delivered, by rank; the coordinator's own is None.
        failed_parts: The failures that have been delivered in place of parts.
        is_deciding: Whether all parts are there and the coordinator is deciding.
        expected: What a rank is at that waits for others without having done its part.
        verdict: Why the session has failed; None while it has not.
        given_up: Why some rank has given the coordinator up; None while none has.
        deadline: When the session fails because a part has failed, whoever is still missing.
    """

    missing: set[int]
    step: int = 0
    label: Label | None = None
    parts: dict[int, Segments | None] = field(default_factory=dict)
    failed_parts: Failures = field(default_factory=dict)
    is_deciding: bool = False
    expected: Label | None = None
    verdict: Verdict | None = None
    given_up: Verdict | None = None
    deadline: float | None = None
    ended: set[int] = field(default_factory=set)
    left: list[Verdict] = field(default_factory=list)


class Ledger:
    """All open sessions.

    Args:
        world_size: The number of ranks.
        failed: Called with a session's number and verdict when it fails; with a rank, for one that came late.
    """

    def __init__(self, world_size: int, failed: Callable[[int, Verdict, int | None], None]) -> None:
        self._ranks = frozenset(range(world_size))
        self._failed = failed
        self._sessions: dict[int, Session] = {}
        self._gone: dict[int, Failures] = {}

    def session(self, number: int) -> Session:
        """The session of that number, opened by whoever comes first."""
        if number not in self._sessions:
            self._sessions[number] = Session(missing=set(self._ranks))
        return self._sessions[number]

    def deliver(
        self, number: int, step: int, rank: int, label: Label, part: Segments | None, now: float
    ) -> None:
        """A rank has done its part."""
        session = self._enter(number, step, rank, label)
        if session is not None:
            session.label = session.label or label
            session.parts[rank] = part
            session.missing.discard(rank)
            self._look(number, session, now)

    def deliver_failure(
        self, number: int, step: int, rank: int, label: Label, failure: WRAPPED_EXCEPTION, now: float
    ) -> None:
        """A rank has failed to do its part."""
        session = self._enter(number, step, rank, label)
        if session is not None:
            session.label = session.label or label
            session.failed_parts[rank] = failure
            session.missing.discard(rank)
            if session.deadline is None:
                session.deadline = now + _GRACE * label.timeout
            self._look(number, session, now)

    def expect(self, number: int, step: int, rank: int, label: Label, now: float) -> None:
        """A rank waits for others, without having done a part or in the middle of it."""
        if step < self.session(number).step:
            return  # it came late; what it waits for is on its way
        session = self._enter(number, step, rank, label)
        if session is not None:
            session.expected = session.expected or label
            self._look(number, session, now)

    def _enter(self, number: int, step: int, rank: int, label: Label) -> Session | None:
        """The session, if it has not failed and all who are in it are doing the same."""
        session = self.session(number)
        if session.verdict is not None:
            self._failed(number, session.verdict, rank)
            return None
        there = session.label or session.expected or label
        if (step, label.purpose, label.step) == (session.step, there.purpose, there.step):
            return session
        verdict = Verdict(label.step, {rank: (unlike(rank, label, there), traceback.StackSummary())})
        if session.is_deciding:
            session.left.append(verdict)  # what is being decided is decided; the next step fails
        else:
            self.fail(number, verdict)
        return None

    def conclude(self, number: int) -> None:
        """The coordinator has told all ranks the outcome of the step; the next one begins."""
        session = self.session(number)
        session.step += 1
        session.label = session.expected = None
        session.missing = set(self._ranks)
        session.parts, session.failed_parts, session.deadline = {}, {}, None
        session.is_deciding = False
        if session.given_up is not None:
            self.fail(number, session.given_up)
        for verdict in session.left:
            self.fail(number, verdict)

    def leave(self, number: int, rank: int, verdict: Verdict) -> None:
        """A rank has left the session in the middle: interrupted, or by an error between two steps."""
        session = self.session(number)
        session.left.append(verdict)
        if not session.is_deciding:
            self.fail(number, verdict)
        self.end(number, rank)

    def give_up(self, number: int, verdict: Verdict) -> None:
        """A rank took the coordinator for dead, and has raised."""
        session = self.session(number)
        session.given_up = verdict
        if not session.is_deciding:
            self.fail(number, verdict)

    def lose(self, rank: int, reason: str, now: float) -> None:
        """A rank's connection is gone."""
        self._gone[rank] = lost_rank(rank, reason)
        for number, session in list(self._sessions.items()):
            self._look(number, session, now)

    def find(self, rank: int) -> None:
        """A rank has connected again."""
        self._gone.pop(rank, None)

    def silence(self, rank: int) -> None:
        """A rank has given no sign of life: fail every session that waits for it."""
        for number, missing, label in list(self.waiting()):
            if rank in missing:
                self.fail(number, Verdict(label.step, silent_rank(rank, label.timeout)))

    def fail(self, number: int, verdict: Verdict) -> None:
        """End the session for all."""
        session = self.session(number)
        if session.verdict is None:
            session.verdict = verdict
            session.is_deciding = False
            session.parts.clear()
            self._failed(number, verdict, None)

    def end(self, number: int, rank: int) -> None:
        """A rank has no more to do with the session; when none has, it is forgotten."""
        session = self._sessions.get(number)
        if session is not None:
            session.ended.add(rank)
            if session.ended >= self._ranks:
                del self._sessions[number]
            else:
                self._look(number, session, -math.inf)

    def waiting(self) -> Iterator[tuple[int, set[int], Label]]:
        """The sessions in which somebody waits: number, ranks that are missing, what for."""
        for number, session in self._sessions.items():
            label = session.label or session.expected
            if label is not None and session.verdict is None and not session.is_deciding:
                yield number, session.missing, label

    def alarm(self) -> float | None:
        """When the next session fails for a part that failed."""
        due = [s.deadline for s in self._sessions.values() if s.deadline is not None and s.verdict is None]
        return min(due, default=None)

    def rang(self, now: float) -> None:
        """Look at the sessions whose time has come."""
        for number, session in list(self._sessions.items()):
            self._look(number, session, now)

    def _look(self, number: int, session: Session, now: float) -> None:
        """Whether the step can be decided, or must fail."""
        label = session.label or session.expected
        if session.verdict is not None or session.is_deciding or label is None:
            return
        missing = session.missing
        lost = {rank: self._gone[rank][rank] for rank in self._gone if rank in missing}
        for rank in missing & session.ended:
            lost.update(lost_rank(rank, f"it has left the {label.purpose} before this step"))
        is_late = session.deadline is not None and now >= session.deadline
        if lost or is_late or (not missing and session.failed_parts):
            self.fail(number, Verdict(label.step, {**session.failed_parts, **lost}))
        elif not missing:
            session.is_deciding = True
