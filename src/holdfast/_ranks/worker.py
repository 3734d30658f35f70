"""The end of a channel of every rank but the coordinator: one connection, and what has come over it."""

import logging
import math
import threading
import time

from holdfast._ranks.addresses import Address
from holdfast._ranks.authentication import ConnectionRequest
from holdfast._ranks.event_loop import EventLoop
from holdfast._ranks.failures import (
    Failures,
    PackedFailure,
    SessionFailedError,
    SessionFailure,
    lost_rank,
    pack,
    silent_rank,
    unpack,
)
from holdfast._ranks.heartbeat import heartbeat_port
from holdfast._ranks.ledger import Label, different_calls
from holdfast._ranks.listener import Listener, connect
from holdfast._ranks.messages import Message, MessageKind, Segments, decode, encode
from holdfast._ranks.peer import Peer
from holdfast.errors import WRAPPED_EXCEPTION

logger = logging.getLogger(__name__)


class WorkerEnd:
    """What this rank has been told.

    Args:
        rank: This rank.
        coordinator: The coordinator's rank.
        address: Where the coordinator listens.
        secret: What both must know.

    Attributes:
        listener: Where other ranks connect for broadcasts.

    Raises:
        ConnectionError: The coordinator cannot be reached.
    """

    def __init__(self, rank: int, coordinator: int, address: Address, secret: bytes) -> None:
        self._rank = rank
        self._coordinator = coordinator
        self._address = address
        self._secret = secret
        self._answers: dict[tuple[int, int], Segments] = {}
        self._failures: dict[int, SessionFailure] = {}
        self._given_up: set[int] = set()
        self._waiting: dict[int, Label] = {}
        self._lost: Failures | None = None
        self._reconnecting = threading.Lock()
        peer = self._connect()
        self._loop = EventLoop(self, "holdfast-worker")
        self.listener = Listener(self._loop, secret, lambda connection, _request: connection.close())
        self._set_coordinator(peer)
        self._loop.start()

    def _connect(self, timeout: float = math.inf) -> Peer:
        request = ConnectionRequest(self._rank, heartbeat_port())
        return Peer(
            self._coordinator,
            *connect(self._address, self._secret, request, until=time.monotonic() + timeout),
        )

    def _set_coordinator(self, peer: Peer) -> None:
        self._peer = peer
        self._lost = None
        self._loop.add(peer)

    # For the exchange, in any thread.

    def begin(self, number: int, timeout: float = math.inf) -> None:
        """Begin a session on this rank. If the connection broke, connect again: both ends may be well.

        The coordinator is taken for dead if it does not answer within ``timeout`` seconds.
        """
        self._loop.call(lambda: self.listener.begin_session(number))
        with self._reconnecting:
            # Without the thread nobody would serve the connection, and the others would wait for this rank.
            if self._lost is not None and not self._loop.is_gone():
                try:
                    peer = self._connect(timeout)
                except OSError:
                    return  # the coordinator is dead, and the first step will say so
                self._loop.call(lambda: self._set_coordinator(peer))
                self._loop.settle()
                if self._loop.is_gone():
                    peer.connection.close()

    def check(self, number: int, step: str) -> None:
        """Raise SessionFailedError if the session has failed; ``step`` is where this rank is."""
        with self._loop.changed:
            self._raise_if_failed(number, step)

    def expect(self, number: int, step: int, label: Label) -> None:
        """Wait for other ranks without having done this rank's part: those that are missing are watched."""

        def tell() -> None:
            self._waiting[number] = label
            self._loop.post(self._peer, Message(MessageKind.EXPECT, number, step, encode(tuple(label))))

        self._loop.call(tell)

    def deliver(
        self, number: int, step: int, label: Label, part: Segments, failure: WRAPPED_EXCEPTION | None
    ) -> None:
        """Tell the coordinator that this rank has done its part, or failed to."""
        kind = MessageKind.PART
        if failure is not None:
            kind = MessageKind.FAILED_PART
            part = pack(SessionFailure(label.step, {self._rank: PackedFailure.of(failure)}))
        message = Message(kind, number, step, [*encode(tuple(label)), *part])
        self._loop.call(lambda: self._loop.post(self._peer, message))

    def receive(self, number: int, step: int, label: Label) -> Segments:
        """Wait for the coordinator's answer, for as long as the coordinator is alive.

        Raises:
            SessionFailedError: The session has failed, the coordinator is lost, or it is at another step.
        """

        def is_over() -> bool:
            return (number, step) in self._answers or number in self._failures or self._lost is not None

        def warn() -> None:
            logger.warning(
                "%s: rank %d still waits for the others in step %r", label.purpose, self._rank, label.step
            )

        self._loop.call(lambda: self._waiting.update({number: label}))
        try:
            with self._loop.changed:
                self._loop.wait_until(is_over, warn)
                if (number, step) not in self._answers:  # an answer counts, whatever came after it
                    self._raise_if_failed(number, label.step)
                head, *answer = self._answers.pop((number, step))
        finally:
            self._loop.call(lambda: self._stop_waiting(number))
        theirs = Label(*decode([head]))
        if theirs[:2] != label[:2]:
            failure = different_calls(self._rank, label, theirs)
            raise SessionFailedError(SessionFailure(label.step, {self._rank: failure}))
        return answer

    def abort(self, number: int, failure: SessionFailure) -> None:
        """Leave a session in the middle, which ends it for all ranks."""
        self._leave(Message(MessageKind.ABORT, number, 0, pack(failure)))

    def end(self, number: int, timeout: float) -> None:
        """Leave a session at its end. The kernel has all that was sent when this returns."""
        self._leave(Message(MessageKind.END, number))
        self._loop.flush(timeout)

    def close(self, timeout: float = 1.0) -> None:
        """End the thread and the connection."""
        self._loop.close(timeout)

    def _stop_waiting(self, number: int) -> None:
        self._waiting.pop(number, None)

    def _leave(self, message: Message) -> None:
        number = message.session

        def leave() -> None:
            self._loop.post(self._peer, message)
            self.listener.end_session(number)
            self._stop_waiting(number)
            self._failures.pop(number, None)
            self._given_up.discard(number)
            for key in [key for key in self._answers if key[0] == number]:
                del self._answers[key]

        self._loop.call(leave)

    def _raise_if_failed(self, number: int, step: str) -> None:
        if number in self._failures:
            raise SessionFailedError(self._failures[number], is_told=number not in self._given_up)
        if self._lost is not None:
            raise SessionFailedError(SessionFailure(step, self._lost), is_told=False)

    # For the event loop, in its thread.

    def on_message(self, _peer: Peer, message: Message) -> None:
        """Keep the answer or the failure until the exchange asks for it."""
        number = message.session
        if message.kind is MessageKind.ASK and self.listener.has_begun(number):
            self._loop.post(self._peer, Message(MessageKind.BEGUN, number))
        if self.listener.is_over(number):
            return  # for a session that this rank has left
        if message.kind is MessageKind.ANSWER:
            self._answers[number, message.step] = message.body
        elif message.kind is MessageKind.FAILURE:
            self._failures.setdefault(number, unpack(message.body))

    def on_lost(self, peer: Peer, reason: str) -> None:
        """Fail every session until there is a new connection to the coordinator."""
        if peer is self._peer:
            self._lost = lost_rank(peer.rank, reason)

    def on_silent(self, peer: Peer) -> None:
        """Take the coordinator for dead, and tell it so, for the case that it continues."""
        for number, label in self._waiting.items():
            failure = SessionFailure(label.step, silent_rank(peer.rank, label.timeout))
            if number not in self._failures:
                self._failures[number] = failure
                self._given_up.add(number)
            self._loop.post(peer, Message(MessageKind.GIVE_UP, number, 0, pack(failure)))

    def on_broken(self, error: BaseException) -> None:
        """Fail every later call: nothing can be heard any more."""
        self._lost = lost_rank(self._rank, f"its channel broke: {error!r}")

    def watched(self) -> dict[Peer, float]:
        """Return the coordinator, while somebody here waits for it, and how long it may be silent."""
        timeout = self.shortest_timeout()
        return {} if timeout is None else {self._peer: timeout}

    def shortest_timeout(self) -> float | None:
        """Return the shortest timeout of all sessions that wait."""
        return min((label.timeout for label in self._waiting.values()), default=None)
