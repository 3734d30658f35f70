"""The coordinator's end of a channel: a link to every other rank, and the ledger of what they do."""

import logging
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping

from holdfast._ranks.dock import Dock
from holdfast._ranks.door import TOKEN_SIZE, Door
from holdfast._ranks.failures import SessionFailedError, Verdict, lost_rank, pack, unpack
from holdfast._ranks.frames import Frame, Kind, Segments, decode, encode
from holdfast._ranks.ledger import Label, Ledger
from holdfast._ranks.link import Link
from holdfast._ranks.loop import Loop
from holdfast._ranks.pulse import pulse_port
from holdfast.errors import WRAPPED_EXCEPTION

__all__ = ["HELLO", "PATIENCE", "WELCOME", "Hub"]

HELLO = struct.Struct("!16sIH")  # the first half of the token, rank, port of the pulse
WELCOME = struct.Struct("!16sH")  # the second half of the token, port of the pulse
PATIENCE = 60.0  # seconds of waiting for others until it is worth a line in the log

logger = logging.getLogger(__name__)


class Hub:
    """What the coordinator knows and tells.

    Attributes:
        port: Where it listens.
        token: What a rank must know to be let in; both halves.
        dock: Where lanes into this rank arrive.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.token = secrets.token_bytes(TOKEN_SIZE)
        self._rank = rank
        self._links: dict[int, Link] = {}
        self._ledger = Ledger(world_size, self._tell_failure)
        self._broken: BaseException | None = None
        self._loop = Loop(self, "holdfast-hub")
        welcome = WELCOME.pack(self.token[16:], pulse_port())
        door = Door(self._loop, self.token, HELLO.size, welcome, self._admit, backlog=world_size)
        self.port = door.port
        self.dock = Dock(self._loop, self.token)
        self._loop.start()

    # What the exchange asks for, in any thread.

    def begin(self, number: int) -> None:
        """This rank opens a session."""

    def check(self, number: int, step: str) -> None:
        """Raise SessionFailedError if the session has failed; ``step`` is where this rank is."""
        with self._loop.changed:
            self._raise_if_failed(number, step)

    def expect(self, number: int, step: int, label: Label) -> None:
        """Say where this rank is without having done its part; have those watched who have not either."""
        self._loop.call(lambda: self._ledger.expect(number, step, self._rank, label, time.monotonic()))

    def gather(
        self, number: int, step: int, label: Label, failure: WRAPPED_EXCEPTION | None
    ) -> dict[int, Segments]:
        """Having done this rank's own part, or failed to, wait for those of all others."""

        def deliver() -> None:
            now = time.monotonic()
            if failure is None:
                self._ledger.deliver(number, step, self._rank, label, None, now)
            else:
                self._ledger.deliver_failure(number, step, self._rank, label, failure, now)

        self._loop.call(deliver)
        with self._loop.changed:
            session = self._ledger.session(number)
            self._wait(lambda: session.is_deciding or session.verdict is not None, number, label)
            self._raise_if_failed(number, label.step)
            return {rank: part for rank, part in session.parts.items() if part is not None}

    def announce(self, number: int, step: int, label: Label, answers: Mapping[int, Segments]) -> None:
        """Tell each rank its answer, all or none: not even an interrupt comes between."""
        head = encode(tuple(label))

        def tell() -> None:
            if self._ledger.session(number).verdict is None:
                for rank, answer in answers.items():
                    if rank in self._links:
                        self._loop.post(self._links[rank], Frame(Kind.ANSWER, number, step, [*head, *answer]))
                self._ledger.conclude(number)

        self._loop.call(tell)
        # So that what was decided is on its way before this rank does anything else, such as die.
        self._loop.settle()

    def fail(self, number: int, verdict: Verdict) -> None:
        """The coordinator's own verdict."""
        self._loop.call(lambda: self._ledger.fail(number, verdict))
        self._loop.settle()

    def fence(self, number: int, step: str) -> None:
        """Raise SessionFailedError if a rank has given this session up, as far as its word has come here."""
        self._loop.settle()
        with self._loop.changed:
            self._raise_if_failed(number, step)
            given_up = self._ledger.session(number).given_up
        if given_up is not None:
            self.fail(number, given_up)
            raise SessionFailedError(given_up)

    def abort(self, number: int, verdict: Verdict) -> None:
        """This rank leaves the session in the middle."""

        def leave() -> None:
            self._ledger.fail(number, verdict)
            self._ledger.end(number, self._rank)

        self._loop.call(leave)

    def end(self, number: int, timeout: float) -> None:
        """This rank leaves the session; what it said has been handed to the kernel when this returns."""
        self._loop.call(lambda: self._ledger.end(number, self._rank))
        self._loop.flush(timeout)

    def close(self, patience: float = 1.0) -> None:
        """End the thread and all connections."""
        self._loop.close(patience)

    def _raise_if_failed(self, number: int, step: str) -> None:
        if self._broken is not None:
            reason = f"its channel broke: {self._broken!r}"
            raise SessionFailedError(Verdict(step, lost_rank(self._rank, reason)))
        verdict = self._ledger.session(number).verdict
        if verdict is not None:
            raise SessionFailedError(verdict)

    def _wait(self, is_over: Callable[[], bool], number: int, label: Label) -> None:
        def done() -> bool:
            return is_over() or self._broken is not None

        if not self._loop.changed.wait_for(done, PATIENCE):
            missing = {n: ranks for n, ranks, _ in self._ledger.waiting()}.get(number, set())
            logger.warning(
                "%s: still waiting for rank(s) %s in step %r", label.purpose, sorted(missing), label.step
            )
            self._loop.changed.wait_for(done)

    # What the loop calls, in its thread.

    def _admit(self, connection: socket.socket, said: bytes) -> None:
        _, rank, pulse = HELLO.unpack(said)
        self._let_in(Link(connection, rank, pulse))

    def _let_in(self, link: Link) -> None:
        before = self._links.get(link.rank)
        if before is not None:
            self._loop.drop(before, "it connected anew")
        self._ledger.find(link.rank)
        self._links[link.rank] = link
        self._loop.add(link)

    def received(self, link: Link, frame: Frame) -> None:
        """Enter it into the ledger."""
        number, step, rank = frame.session, frame.step, link.rank
        if frame.kind is Kind.PART:
            label = Label(*decode(frame.body[:1]))
            self._ledger.deliver(number, step, rank, label, frame.body[1:], time.monotonic())
        elif frame.kind is Kind.FAILED_PART:
            label, failure = Label(*decode(frame.body[:1])), unpack(frame.body[1:]).failures[rank]
            self._ledger.deliver_failure(number, step, rank, label, failure, time.monotonic())
        elif frame.kind is Kind.EXPECT:
            self._ledger.expect(number, step, rank, Label(*decode(frame.body)), time.monotonic())
        elif frame.kind is Kind.ABORT:
            self._ledger.leave(number, rank, unpack(frame.body))
        elif frame.kind is Kind.GIVE_UP:
            self._ledger.give_up(number, unpack(frame.body))
        elif frame.kind is Kind.END:
            self._ledger.end(number, rank)

    def lost(self, link: Link, reason: str) -> None:
        """Enter it into the ledger."""
        if self._links.get(link.rank) is link:
            del self._links[link.rank]
        self._ledger.lose(link.rank, reason, time.monotonic())

    def silent(self, link: Link) -> None:
        """Enter it into the ledger."""
        self._ledger.silence(link.rank)

    def watched(self) -> dict[Link, float]:
        """The ranks whose parts are missing."""
        watched: dict[Link, float] = {}
        for _, missing, label in self._ledger.waiting():
            for rank in missing & self._links.keys():
                link = self._links[rank]
                watched[link] = min(label.timeout, watched.get(link, label.timeout))
        return watched

    def patience(self) -> float | None:
        """The shortest timeout of all who wait."""
        return min((label.timeout for _, _, label in self._ledger.waiting()), default=None)

    def alarm(self) -> float | None:
        """When the ledger wants to be looked at."""
        return self._ledger.alarm()

    def rang(self, now: float) -> None:
        """Look at it."""
        self._ledger.rang(now)

    def broken(self, error: BaseException) -> None:
        """Nothing can be told any more."""
        self._broken = error

    def _tell_failure(self, number: int, verdict: Verdict, to: int | None) -> None:
        body = pack(verdict)
        for rank, link in self._links.items():
            if to is None or to == rank:
                self._loop.post(link, Frame(Kind.FAILURE, number, 0, body))
