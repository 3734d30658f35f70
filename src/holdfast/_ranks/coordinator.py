"""The coordinator's end of a channel: a connection to every other rank, and the record of what they do."""

import logging
import math
import socket
import time
from collections.abc import Mapping

from holdfast._ranks import roll_call
from holdfast._ranks.authentication import ConnectionRequest, new_secret
from holdfast._ranks.event_loop import EventLoop
from holdfast._ranks.failures import (
    PackedFailure,
    SessionFailedError,
    SessionFailure,
    lost_rank,
    pack,
    unpack,
)
from holdfast._ranks.ledger import Label, Ledger, Outcome
from holdfast._ranks.listener import Listener
from holdfast._ranks.messages import Message, MessageKind, Segments, decode, encode
from holdfast._ranks.peer import Peer
from holdfast.errors import WRAPPED_EXCEPTION

logger = logging.getLogger(__name__)
_ANSWER_TIME = 1.0  # seconds that a rank has to say that it has begun a session


class CoordinatorEnd:
    """What the coordinator knows and tells.

    Args:
        rank: The coordinator.
        world_size: How many ranks there are.
        call_timeout: After how many seconds a session fails that some rank has not even begun.

    Attributes:
        listener: Where the other ranks connect.
        secret: What a rank must know to connect.
    """

    def __init__(self, rank: int, world_size: int, call_timeout: float = math.inf) -> None:
        self.secret = new_secret()
        self._rank = rank
        self._call_timeout = call_timeout
        self._peers: dict[int, Peer] = {}
        self._ledger = Ledger(world_size, self._tell_failure)
        self._broken: BaseException | None = None
        self._loop = EventLoop(self, "holdfast-coordinator")
        self.listener = Listener(
            self._loop,
            self.secret,
            self._admit,
            expected=lambda: world_size - 1 - len(self._peers),
        )
        self._loop.start()

    # For the exchange, in any thread.

    def begin(self, number: int, _timeout: float = math.inf) -> None:
        """Begin a session on this rank."""
        self._loop.call(lambda: self.listener.begin_session(number))

    def check(self, number: int, step: str) -> None:
        """Raise SessionFailedError if the session has failed; ``step`` is where this rank is."""
        with self._loop.changed:
            self._raise_if_failed(number, step)

    def expect(self, number: int, step: int, label: Label) -> None:
        """Wait for other ranks without having done this rank's part: those that are missing are watched."""
        self._loop.call(lambda: self._expect(number, step, self._rank, label))

    def gather(
        self, number: int, step: int, label: Label, failure: WRAPPED_EXCEPTION | None
    ) -> dict[int, Segments]:
        """Record that this rank has done its own part, or failed to; wait for those of all others.

        Raises:
            SessionFailedError: A rank has failed, is lost, or is at another step.
        """
        packed = failure and PackedFailure.of(failure)
        self._loop.call(lambda: self._deliver(number, step, self._rank, label, packed))
        with self._loop.changed:
            session = self._ledger.session(number)

            def is_over() -> bool:
                return session.is_deciding or session.failure is not None or self._broken is not None

            def warn() -> None:
                logger.warning(
                    "%s: still waiting for rank(s) %s in step %r",
                    label.purpose,
                    sorted(session.missing),
                    label.step,
                )

            self._loop.wait_until(is_over, warn)
            self._raise_if_failed(number, label.step)
            return {rank: part for rank, part in session.parts.items() if part is not None}

    def announce(self, number: int, step: int, label: Label, answers: Mapping[int, Segments]) -> None:
        """Tell each rank its answer, all or none: not even an interrupt comes between."""
        head = encode(tuple(label))

        def tell() -> None:
            if self._ledger.session(number).failure is None:
                for rank in answers.keys() & self._peers.keys():
                    body = [*head, *answers[rank]]
                    self._loop.post(self._peers[rank], Message(MessageKind.ANSWER, number, step, body))
                self._ledger.conclude(number)

        self._loop.call(tell)
        # So that the answers are on their way before this rank does anything else, such as die.
        self._loop.settle()

    def fail(self, number: int, failure: SessionFailure) -> None:
        """End a session for all ranks."""
        self._loop.call(lambda: self._ledger.fail(number, failure))
        self._loop.settle()

    def raise_if_given_up(self, number: int, step: str) -> None:
        """Raise SessionFailedError if the session has failed, or a rank has taken this one for dead.

        What the ranks had sent before this call, and has arrived, counts.
        """
        self._loop.settle()
        with self._loop.changed:
            self._raise_if_failed(number, step)
            given_up = self._ledger.session(number).given_up
        if given_up is not None:
            self.fail(number, given_up)
            raise SessionFailedError(given_up)

    def others_at_work(self, number: int) -> bool:
        """Whether another rank may still be doing its part of the step, also if the session has failed."""
        with self._loop.changed:
            return bool(self._ledger.at_work(number) - {self._rank})

    def abort(self, number: int, failure: SessionFailure) -> None:
        """Leave a session in the middle, which ends it for all ranks."""

        def leave() -> None:
            self._ledger.fail(number, failure)
            self._leave(number)

        self._loop.call(leave)

    def end(self, number: int, timeout: float) -> None:
        """Leave a session at its end. The kernel has all that was sent when this returns."""
        self._loop.call(lambda: self._leave(number))
        self._loop.flush(timeout)

    def close(self, timeout: float = 1.0) -> None:
        """End the thread and all connections."""
        self._loop.close(timeout)

    def _raise_if_failed(self, number: int, step: str) -> None:
        failure = self._ledger.session(number).failure
        if self._broken is not None:
            failure = SessionFailure(step, lost_rank(self._rank, f"its channel broke: {self._broken!r}"))
        if failure is not None:
            raise SessionFailedError(failure)

    # For the event loop, in its thread.

    def _leave(self, number: int) -> None:
        self._ledger.end(number, self._rank)
        self.listener.end_session(number)

    def _admit(self, connection: socket.socket, request: ConnectionRequest) -> None:
        before = self._peers.get(request.rank)
        if before is not None:
            self._loop.drop(before, "it connected anew")
        peer = Peer(request.rank, connection, request.heartbeat_port)
        self._ledger.find(peer.rank)
        self._peers[peer.rank] = peer
        self._loop.add(peer)

    def on_message(self, peer: Peer, message: Message) -> None:
        """Record what the rank has done."""
        number, step, rank, kind = message.session, message.step, peer.rank, message.kind
        if kind in (MessageKind.PART, MessageKind.FAILED_PART):
            label, part = Label(*decode(message.body[:1])), message.body[1:]
            outcome = part if kind is MessageKind.PART else unpack(part).failures[rank]
            self._deliver(number, step, rank, label, outcome)
        elif kind is MessageKind.EXPECT:
            self._expect(number, step, rank, Label(*decode(message.body)))
        elif kind is MessageKind.ABORT:
            self._ledger.leave(number, rank, unpack(message.body))
        elif kind is MessageKind.GIVE_UP:
            self._ledger.give_up(number, unpack(message.body))
        elif kind is MessageKind.END:
            self._ledger.end(number, rank)
        elif kind is MessageKind.BEGUN:
            self._ledger.has_begun(number, rank)

    def _deliver(self, number: int, step: int, rank: int, label: Label, outcome: Outcome) -> None:
        deadline = self._ledger.deliver(number, step, rank, label, outcome, time.monotonic())
        if deadline is not None:
            self._loop.call_at(deadline, self._ledger.check_deadlines)
        self._remind_later(number)

    def _expect(self, number: int, step: int, rank: int, label: Label) -> None:
        self._ledger.expect(number, step, rank, label, time.monotonic())
        self._remind_later(number)

    def _remind_later(self, number: int) -> None:
        """Ask after a while for ranks that have not begun a session that others have begun."""
        session = self._ledger.session(number)
        if not session.is_watched:
            session.is_watched = True
            now, interval = time.monotonic(), roll_call.FIRST_REMINDER
            self._loop.call_at(now + interval, lambda _: self._ask(number, now, interval))

    def _ask(self, number: int, since: float, interval: float) -> None:
        if self.listener.has_begun(number):
            self._ledger.has_begun(number, self._rank)
        absent, _ = self._ledger.absent(number)
        # A rank that is busy with its part has told nothing yet.
        for rank in self._peers.keys() & set(absent):
            self._loop.post(self._peers[rank], Message(MessageKind.ASK, number))
        if absent:
            at = time.monotonic() + _ANSWER_TIME
            self._loop.call_at(at, lambda now: self._remind(number, since, interval, now))

    def _remind(self, number: int, since: float, interval: float, now: float) -> None:
        absent, label = self._ledger.absent(number)
        if not absent:
            return
        if label is not None and now - since >= self._call_timeout:
            failures = roll_call.absent_ranks(absent, label.purpose)
            self._ledger.fail(number, SessionFailure(label.step, failures))
            return
        if label is not None:
            logger.warning("%s", roll_call.describe_absence(absent, label.purpose))
        interval = roll_call.next_interval(interval)
        at = min(now + interval, max(now, since + self._call_timeout))
        self._loop.call_at(at, lambda _: self._ask(number, since, interval))

    def on_lost(self, peer: Peer, reason: str) -> None:
        """Record that the rank is lost."""
        if self._peers.get(peer.rank) is peer:
            del self._peers[peer.rank]
        self._ledger.lose(peer.rank, reason, time.monotonic())

    def on_silent(self, peer: Peer) -> None:
        """Fail the sessions that wait for the rank."""
        self._ledger.silence(peer.rank)

    def on_broken(self, error: BaseException) -> None:
        """Fail every later call: nothing can be told any more."""
        self._broken = error

    def watched(self) -> dict[Peer, float]:
        """Return the ranks whose parts are missing, and how long each may be silent."""
        watched: dict[Peer, float] = {}
        for _, missing, label in self._ledger.waiting():
            for rank in missing & self._peers.keys():
                peer = self._peers[rank]
                watched[peer] = min(label.timeout, watched.get(peer, label.timeout))
        return watched

    def shortest_timeout(self) -> float | None:
        """Return the shortest timeout of all ranks that wait."""
        return min((label.timeout for _, _, label in self._ledger.waiting()), default=None)

    def _tell_failure(self, number: int, failure: SessionFailure, to: int | None) -> None:
        body = pack(failure)
        for rank, peer in self._peers.items():
            if to is None or to == rank:
                self._loop.post(peer, Message(MessageKind.FAILURE, number, 0, body))
