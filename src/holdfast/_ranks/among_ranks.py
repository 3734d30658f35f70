"""The exchange among the ranks of a process group, over a channel of their own."""

import traceback
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from holdfast._ranks.channel import Channel, open_channel
from holdfast._ranks.dock import set_out
from holdfast._ranks.exchange import Alone, Exchange
from holdfast._ranks.failures import Failures, SessionFailedError, Verdict, attempt, lost_rank
from holdfast._ranks.frames import Segments, decode, encode
from holdfast._ranks.lane import Lane, lane_key
from holdfast._ranks.ledger import Label
from holdfast.errors import CheckpointException, UsageError, portable_failure

__all__ = ["DEFAULT_PEER_TIMEOUT", "AmongRanks", "open_exchange"]

T = TypeVar("T")
R = TypeVar("R")

DEFAULT_PEER_TIMEOUT = 10.0


def open_exchange(
    group: dist.ProcessGroup | None,
    *,
    purpose: str,
    no_dist: bool = False,
    use_collectives: bool = True,
    coordinator_rank: int = 0,
    peer_timeout: float = DEFAULT_PEER_TIMEOUT,
) -> Exchange:
    """The exchange for one save or load among the ranks of ``group``, or of nobody.

    To be called on every rank, in the same order; a save that is to run in another thread opens its
    exchange in the trainer's and takes it along. The first call for a group opens its channel.

    Args:
        group: The process group; by default all ranks.
        purpose: ``"save"`` or ``"load"``; ranks that do not mean the same raise.
        no_dist: Whether this process works alone, whatever groups there are.
        use_collectives: False: this rank works alone, under its number in the group.
        coordinator_rank: The number in the group of the rank that decides.
        peer_timeout: After how many seconds without a sign of life a rank is taken for dead.

    Raises:
        UsageError: ``peer_timeout`` is not positive, or this process is not in the group.
        CheckpointException: The channel cannot be opened; the same on every rank.
    """
    if not peer_timeout > 0:
        raise UsageError(f"peer_timeout must be positive, not {peer_timeout!r}", found=peer_timeout)
    if no_dist or not dist.is_available() or not dist.is_initialized():
        return Alone()
    if not use_collectives or dist.get_world_size(group) == 1:
        return Alone(dist.get_rank(group), dist.get_world_size(group))
    return AmongRanks(open_channel(group, coordinator_rank), purpose, peer_timeout)


class AmongRanks(Exchange):
    """One save or load among the ranks of a channel."""

    def __init__(self, channel: Channel, purpose: str, peer_timeout: float) -> None:
        self.rank = channel.rank
        self.world_size = channel.world_size
        self.is_coordinator = channel.hub is not None
        self._channel = channel
        self._purpose = purpose
        self._timeout = peer_timeout
        self._step = 0
        self._lanes: dict[tuple[int, ...], int] = {}
        self._last_step = "open"
        self._number = channel.begin()
        # An interrupt may strike before the with-block: whoever forgets an exchange has left it.
        forgotten = Verdict("open", lost_rank(self.rank, "it was interrupted"))
        self._abandon = weakref.finalize(self, channel.end.abort, self._number, forgotten)

    def decide(self, step: str, part: Callable[[], T], decision: Callable[[list[T]], Sequence[R]]) -> R:
        """Do this rank's part, and learn the outcome."""
        label = self._begin(step)
        try:
            self._channel.end.check(self._number, step)
            mine, failure = attempt(part)
            if self._channel.hub is None:
                answer: R = self._ask(label, mine, failure)
            else:
                others = self._channel.hub.gather(self._number, self._step, label, failure)
                answer = self._answer(label, mine, others, decision)
        except SessionFailedError as failed:
            raise CheckpointException.of(*failed.verdict) from None
        finally:
            self._step += 1
        return answer

    def share(self, step: str, produce: Callable[[], R]) -> R:
        """Learn what the coordinator has; nobody else need have come this far."""
        label = self._begin(step)
        hub, member = self._channel.hub, self._channel.member
        try:
            self._channel.end.check(self._number, step)
            self._channel.end.expect(self._number, self._step, label)
            value: R
            if hub is None:
                assert member is not None
                value = decode(member.receive(self._number, self._step, label))
            else:
                made, failure = attempt(lambda: _with_form(produce()))
                if failure is not None:
                    self._fail({self.rank: failure})
                value, form = made
                hub.announce(self._number, self._step, label, dict.fromkeys(self._others(), form))
        except SessionFailedError as failed:
            raise CheckpointException.of(*failed.verdict) from None
        finally:
            self._step += 1
        return value

    def lane(self, members: Sequence[int]) -> Lane:
        """Connect to the next of the ring, and wait for the one before."""
        ring = tuple(members)
        count = self._lanes[ring] = self._lanes.get(ring, 0) + 1
        if len(ring) == 1:
            return Lane(ring, self.rank, None, None, self._check)
        label = Label(self._purpose, self._last_step, self._timeout)
        self._channel.end.expect(self._number, self._step, label)
        following = ring[(ring.index(self.rank) + 1) % len(ring)]
        key = lane_key(self._number, ring, count, following)
        outgoing = set_out(*self._channel.docks[following], self._channel.token, key, self._check)
        key = lane_key(self._number, ring, count, self.rank)
        incoming = self._channel.end.dock.wait_for(key, self._check)
        return Lane(ring, self.rank, incoming, outgoing, self._check)

    def _check(self) -> None:
        """Raise if the exchange has failed."""
        try:
            self._channel.end.check(self._number, self._last_step)
        except SessionFailedError as failed:
            raise CheckpointException.of(*failed.verdict) from None

    def _begin(self, step: str) -> Label:
        self._last_step = step
        return Label(self._purpose, step, self._timeout)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def _ask(self, label: Label, mine: Any, failure: Any) -> Any:
        member = self._channel.member
        assert member is not None
        form: Segments = ()
        if failure is None:
            form, failure = attempt(lambda: encode(mine))
        self.outcome_is_known = failure is not None
        try:
            member.deliver(self._number, self._step, label, form, failure)
            answer = member.receive(self._number, self._step, label)
        except SessionFailedError as failed:
            self.outcome_is_known = failed.is_told or failure is not None
            raise
        self.outcome_is_known = True
        return decode(answer)

    def _answer(
        self, label: Label, mine: Any, others: dict[int, Segments], decision: Callable[..., Sequence[Any]]
    ) -> Any:
        """The coordinator's side once every part is there."""
        hub = self._channel.hub
        assert hub is not None
        parts, failures = {self.rank: mine}, {}
        for rank in self._others():
            form = others.pop(rank)
            parts[rank], failure = attempt(lambda form=form: decode(form))  # type: ignore[misc]
            if failure is not None:
                failures[rank] = failure
        if failures:
            self._fail(failures)
        hub.fence(self._number, self._last_step)
        made, failure = attempt(
            lambda: self._forms(decision([parts[rank] for rank in range(self.world_size)]))
        )
        if failure is not None:
            hub.fence(
                self._number, self._last_step
            )  # that this rank was given up goes before what it raised for it
            self._fail({self.rank: failure})
        own, forms = made
        hub.announce(self._number, self._step, label, forms)
        return own

    def _forms(self, answers: Sequence[Any]) -> tuple[Any, dict[int, Segments]]:
        """This rank's own answer, and those of the others as segments; the same answer is pickled once."""
        assert len(answers) == self.world_size, f"{len(answers)} answers for {self.world_size} ranks"
        forms: dict[int, Segments] = {}
        for rank in self._others():
            if id(answers[rank]) not in forms:
                forms[id(answers[rank])] = encode(answers[rank])
        return answers[self.rank], {rank: forms[id(answers[rank])] for rank in self._others()}

    def _fail(self, failures: Failures) -> None:
        assert self._channel.hub is not None
        verdict = Verdict(self._last_step, failures)
        self._channel.hub.fail(self._number, verdict)
        raise SessionFailedError(verdict)

    def confirm(self) -> None:
        """Raise if a rank has given this exchange up; see Exchange."""
        assert self._channel.hub is not None
        try:
            self._channel.hub.fence(self._number, self._last_step)
        except SessionFailedError as failed:
            raise CheckpointException.of(*failed.verdict) from None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the session for this rank, or for all."""
        if not self._abandon.alive:
            return
        failures = None
        if error is not None and not isinstance(error, Exception):
            failures = lost_rank(self.rank, f"it was interrupted by {_in_a_word(error)}")
        elif error is not None and not isinstance(error, CheckpointException):
            stack = traceback.extract_tb(trace)
            failures = {self.rank: portable_failure((error, stack))}
        if failures is None:
            self._channel.end.end(self._number, self._timeout)
        else:
            self._channel.end.abort(self._number, Verdict(self._last_step, failures))
        self._abandon.detach()


def _with_form(value: Any) -> tuple[Any, Segments]:
    return value, encode(value)


def _in_a_word(error: BaseException) -> str:
    return f"{type(error).__name__}({error})" if error.args else type(error).__name__
