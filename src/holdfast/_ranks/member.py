"""The end of a channel of every rank but the coordinator: one link, and what has come over it."""

import logging
import threading
import traceback
from collections.abc import Callable

from holdfast._ranks.addresses import connect
from holdfast._ranks.dock import Dock
from holdfast._ranks.failures import (
    Failures,
    SessionFailedError,
    Verdict,
    lost_rank,
    pack,
    silent_rank,
    unpack,
)
from holdfast._ranks.frames import Frame, Kind, Segments, decode, encode
from holdfast._ranks.hub import HELLO, PATIENCE, WELCOME
from holdfast._ranks.ledger import Label, unlike
from holdfast._ranks.link import Link
from holdfast._ranks.loop import Loop
from holdfast._ranks.pulse import pulse_port
from holdfast.errors import WRAPPED_EXCEPTION

__all__ = ["Member"]

logger = logging.getLogger(__name__)


class Member:
    """What this rank has been told.

    Attributes:
        dock: Where lanes into this rank arrive.

    Args:
        rank: This rank.
        coordinator: The coordinator's rank.
        hosts: Where the coordinator may be reached.
        port: Its port.
        token: What it wants to hear.

    Raises:
        ConnectionError: The coordinator cannot be reached.
    """

    def __init__(self, rank: int, coordinator: int, hosts: list[str], port: int, token: bytes) -> None:
        self._rank = rank
        self._coordinator = coordinator
        self._address = (hosts, port, token)
        self._answers: dict[tuple[int, int], Segments] = {}
        self._verdicts: dict[int, Verdict] = {}
        self._given_up: set[int] = set()
        self._open: set[int] = set()
        self._latest = -1
        self._waits: dict[int, Label] = {}
        self._lost: Failures | None = None
        self._reviving = threading.Lock()
        link = self._connect()
        self._loop = Loop(self, "holdfast-member")
        self.dock = Dock(self._loop, token)
        self._adopt(link)
        self._loop.start()

    def _connect(self) -> Link:
        hosts, port, token = self._address
        hello = HELLO.pack(token[:16], self._rank, pulse_port())
        connection, welcome = connect(hosts, port, hello, token[16:], WELCOME.size)
        _, pulse = WELCOME.unpack(welcome)
        return Link(connection, self._coordinator, pulse)

    def _adopt(self, link: Link) -> None:
        self._link = link
        self._lost = None
        self._loop.add(link)

    # What the exchange asks for, in any thread.

    def begin(self, number: int) -> None:
        """This rank opens a session. A connection that broke is made anew: both ends may be well."""

        def enter() -> None:
            self._latest = max(number, self._latest)
            self._open.add(number)

        self._loop.call(enter)
        with self._reviving:
            if self._lost is not None:
                try:
                    link = self._connect()
                except OSError:
                    return  # it is dead indeed: the first step says so
                self._loop.call(lambda: self._adopt(link))
                self._loop.settle()

    def check(self, number: int, step: str) -> None:
        """Raise SessionFailedError if the session has failed; ``step`` is where this rank is."""
        with self._loop.changed:
            self._raise_if_failed(number, step)

    def expect(self, number: int, step: int, label: Label) -> None:
        """Say where this rank is without having done its part; have those watched who have not either."""

        def tell() -> None:
            self._waits[number] = label
            self._loop.post(self._link, Frame(Kind.EXPECT, number, step, encode(tuple(label))))

        self._loop.call(tell)

    def deliver(
        self, number: int, step: int, label: Label, part: Segments, failure: WRAPPED_EXCEPTION | None
    ) -> None:
        """Tell the coordinator that this rank has done its part, or failed to."""
        if failure is None:
            frame = Frame(Kind.PART, number, step, [*encode(tuple(label)), *part])
        else:
            told = pack(Verdict(label.step, {self._rank: failure}))
            frame = Frame(Kind.FAILED_PART, number, step, [*encode(tuple(label)), *told])
        self._loop.call(lambda: self._loop.post(self._link, frame))

    def receive(self, number: int, step: int, label: Label) -> Segments:
        """Wait for the coordinator's answer, and for nothing but life or death."""
        self._loop.call(lambda: self._waits.update({number: label}))
        try:
            with self._loop.changed:
                self._wait(lambda: (number, step) in self._answers or self._has_failed(number), label)
                if (number, step) in self._answers:  # an answer counts, whatever came after it
                    head, *answer = self._answers.pop((number, step))
                    theirs = Label(*decode([head]))
                    if theirs[:2] != label[:2]:
                        failure = (unlike(self._rank, label, theirs), traceback.StackSummary())
                        raise SessionFailedError(Verdict(label.step, {self._rank: failure}))
                    return answer
                self._raise_if_failed(number, label.step)
                raise AssertionError("neither an answer nor a failure")
        finally:
            self._loop.call(lambda: _discard(self._waits, number))

    def abort(self, number: int, verdict: Verdict) -> None:
        """This rank leaves the session in the middle."""
        self._leave(number, Frame(Kind.ABORT, number, 0, pack(verdict)))

    def end(self, number: int, timeout: float) -> None:
        """This rank leaves the session; what it said has been handed to the kernel when this returns."""
        self._leave(number, Frame(Kind.END, number))
        self._loop.flush(timeout)

    def close(self, patience: float = 1.0) -> None:
        """End the thread and the connection."""
        self._loop.close(patience)

    def _leave(self, number: int, last_word: Frame) -> None:
        def leave() -> None:
            self._loop.post(self._link, last_word)
            self._open.discard(number)
            self._waits.pop(number, None)
            self._verdicts.pop(number, None)
            self._given_up.discard(number)
            for key in [key for key in self._answers if key[0] == number]:
                del self._answers[key]

        self._loop.call(leave)

    def _has_failed(self, number: int) -> bool:
        return number in self._verdicts or self._lost is not None

    def _raise_if_failed(self, number: int, step: str) -> None:
        if number in self._verdicts:
            raise SessionFailedError(self._verdicts[number], is_told=number not in self._given_up)
        if self._lost is not None:
            raise SessionFailedError(Verdict(step, self._lost), is_told=False)

    def _wait(self, is_over: Callable[[], bool], label: Label) -> None:
        if not self._loop.changed.wait_for(is_over, PATIENCE):
            logger.warning(
                "%s: rank %d still waits for the others in step %r", label.purpose, self._rank, label.step
            )
            self._loop.changed.wait_for(is_over)

    # What the loop calls, in its thread.

    def received(self, _link: Link, frame: Frame) -> None:
        """Keep it until it is asked for."""
        number = frame.session
        if number <= self._latest and number not in self._open:
            return  # for a session that this rank has left
        if frame.kind is Kind.ANSWER:
            self._answers[number, frame.step] = frame.body
        elif frame.kind is Kind.FAILURE:
            self._verdicts.setdefault(number, unpack(frame.body))

    def lost(self, link: Link, reason: str) -> None:
        """Without its coordinator a rank has nobody to talk to."""
        if link is self._link:
            self._lost = lost_rank(link.rank, reason)

    def silent(self, link: Link) -> None:
        """Give the coordinator up, and tell it, for when it wakes."""
        for number, label in self._waits.items():
            verdict = Verdict(label.step, silent_rank(link.rank, label.timeout))
            if number not in self._verdicts:
                self._verdicts[number] = verdict
                self._given_up.add(number)
            self._loop.post(link, Frame(Kind.GIVE_UP, number, 0, pack(verdict)))

    def watched(self) -> dict[Link, float]:
        """The coordinator, while somebody here waits for it."""
        patience = self.patience()
        return {} if patience is None else {self._link: patience}

    def patience(self) -> float | None:
        """The shortest timeout of all who wait."""
        return min((label.timeout for label in self._waits.values()), default=None)

    def alarm(self) -> float | None:
        """None is ever set."""
        return None

    def rang(self, now: float) -> None:
        """Never."""

    def broken(self, error: BaseException) -> None:
        """Nothing can be heard any more."""
        self._lost = lost_rank(self._rank, f"its channel broke: {error!r}")


def _discard(waits: dict[int, Label], number: int) -> None:
    waits.pop(number, None)
