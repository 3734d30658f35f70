"""The exchange among the ranks of a process group, over a channel of their own."""

import contextlib
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from holdfast._ranks.authentication import ConnectionRequest
from holdfast._ranks.broadcast import Broadcast, broadcast_key
from holdfast._ranks.channel import Channel, open_channel
from holdfast._ranks.coordinator import CoordinatorEnd
from holdfast._ranks.exchange import Alone, Exchange, do_nothing
from holdfast._ranks.failures import PackedFailure, SessionFailedError, SessionFailure, attempt, lost_rank
from holdfast._ranks.ledger import Label
from holdfast._ranks.listener import connect
from holdfast._ranks.messages import Segments, decode, encode
from holdfast._ranks.worker import WorkerEnd
from holdfast.errors import WRAPPED_EXCEPTION, CheckpointException, UsageError, portable_failure

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
    """Return the exchange for one save or load among the ranks of ``group``, or for this process alone.

    Every rank must call it, in the same order. A save that will run in another thread opens its exchange in
    the trainer's thread and takes it along. The first call for a group opens its channel.

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
    return GroupExchange(open_channel(group, coordinator_rank, purpose), purpose, peer_timeout)


@contextlib.contextmanager
def _raising_for_all() -> Iterator[None]:
    """Raise a failed session as the CheckpointException that every rank raises."""
    try:
        yield
    except SessionFailedError as failed:
        raise failed.failure.to_raise() from None


class GroupExchange(Exchange):
    """One save or load among the ranks of a channel."""

    can_broadcast = True

    def __init__(self, channel: Channel, purpose: str, peer_timeout: float) -> None:
        self.rank = channel.rank
        self.world_size = self.group_size = len(channel.addresses)
        self.is_coordinator = isinstance(channel.end, CoordinatorEnd)
        self._channel = channel
        self._end = channel.end
        self._purpose = purpose
        self._timeout = peer_timeout
        self._step = 0
        self._broadcasts: dict[tuple[int, ...], int] = {}
        self._last_step = "open"
        self._number = channel.begin(peer_timeout)
        # An interrupt may come before the with-block: an exchange that is garbage counts as left.
        forgotten = SessionFailure("open", lost_rank(self.rank, "it was interrupted"))
        self._abandon = weakref.finalize(self, self._end.abort, self._number, forgotten)

    def decide(self, step: str, part: Callable[[], T], decision: Callable[[list[T]], Sequence[R]]) -> R:
        """Do this rank's part, and return its answer."""
        with self._taking(step) as label:
            mine, failure = attempt(part)
            if isinstance(self._end, WorkerEnd):
                return self._ask(self._end, label, mine, failure)  # type: ignore[no-any-return]
            others = self._end.gather(self._number, self._step, label, failure)
            return self._answer(self._end, label, mine, others, decision)  # type: ignore[no-any-return]

    def share(self, step: str, produce: Callable[[], R]) -> R:
        """Return what the coordinator produces; the other ranks need not have come this far."""
        with self._taking(step) as label:
            self._end.expect(self._number, self._step, label)
            if isinstance(self._end, WorkerEnd):
                return decode(self._end.receive(self._number, self._step, label))  # type: ignore[no-any-return]
            made, failure = attempt(lambda: self._encoded([produce()] * self.world_size))
            if failure is not None:
                self._fail(self._end, {self.rank: failure})
            value, encoded = made
            self._end.announce(self._number, self._step, label, encoded)
            return value  # type: ignore[no-any-return]

    def open_broadcast(self, members: Sequence[int], check: Callable[[], None] = do_nothing) -> Broadcast:
        """Connect to the next rank of the ring, and wait for the one before."""
        ring = tuple(members)
        count = self._broadcasts[ring] = self._broadcasts.get(ring, 0) + 1
        self._end.expect(self._number, self._step, self._label())
        following = ring[(ring.index(self.rank) + 1) % len(ring)]
        request = ConnectionRequest(self.rank, broadcast=broadcast_key(self._number, ring, count, following))
        channel = self._channel

        def check_both() -> None:
            self._check()
            check()

        outgoing, _ = connect(channel.addresses[following], channel.secret, request, check_both)
        key = broadcast_key(self._number, ring, count, self.rank)
        try:
            incoming = self._end.listener.wait_for_broadcast(key, check_both)
        except BaseException:
            outgoing.close()
            raise
        return Broadcast(ring, self.rank, incoming, outgoing, check_both)

    @contextlib.contextmanager
    def _taking(self, step: str) -> Iterator[Label]:
        """Take one step: raise before it if the exchange has failed, and count it however it ends."""
        self._last_step = step
        try:
            self._check()
            with _raising_for_all():
                yield self._label()
        finally:
            self._step += 1

    def _label(self) -> Label:
        return Label(self._purpose, self._last_step, self._timeout)

    def _check(self) -> None:
        """Raise if the exchange has failed."""
        with _raising_for_all():
            self._end.check(self._number, self._last_step)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def _ask(self, end: WorkerEnd, label: Label, mine: Any, failure: Any) -> Any:
        """Take the step as a worker, once this rank has done its part."""
        part: Segments = ()
        if failure is None:
            part, failure = attempt(lambda: encode(mine))
        self.outcome_is_known = failure is not None
        try:
            end.deliver(self._number, self._step, label, part, failure)
            answer = end.receive(self._number, self._step, label)
        except SessionFailedError as failed:
            self.outcome_is_known = failed.is_told or failure is not None
            raise
        self.outcome_is_known = True
        return decode(answer)

    def _answer(
        self,
        end: CoordinatorEnd,
        label: Label,
        mine: Any,
        others: dict[int, Segments],
        decision: Callable[..., Sequence[Any]],
    ) -> Any:
        """Take the step as the coordinator, once all ranks have done their parts."""
        parts, failures = {self.rank: mine}, {}
        for rank in self._others():
            encoded = others.pop(rank)
            parts[rank], failure = attempt(lambda encoded=encoded: decode(encoded))  # type: ignore[misc]
            if failure is not None:
                failures[rank] = failure
        if failures:
            self._fail(end, failures)
        end.raise_if_given_up(self._number, self._last_step)
        made, failure = attempt(
            lambda: self._encoded(decision([parts[rank] for rank in range(self.world_size)]))
        )
        if failure is not None:
            # If this rank was taken for dead, that is what all raise, and not what it raised because of it.
            end.raise_if_given_up(self._number, self._last_step)
            self._fail(end, {self.rank: failure})
        own, encoded_answers = made
        end.announce(self._number, self._step, label, encoded_answers)
        return own

    def _encoded(self, answers: Sequence[Any]) -> tuple[Any, dict[int, Segments]]:
        """Return this rank's answer, and those of the others as segments; the same one is pickled once."""
        assert len(answers) == self.world_size, f"{len(answers)} answers for {self.world_size} ranks"
        encoded: dict[int, Segments] = {}
        for rank in self._others():
            if id(answers[rank]) not in encoded:
                encoded[id(answers[rank])] = encode(answers[rank])
        return answers[self.rank], {rank: encoded[id(answers[rank])] for rank in self._others()}

    def _fail(self, end: CoordinatorEnd, failures: dict[int, WRAPPED_EXCEPTION]) -> None:
        packed = {rank: PackedFailure.of(failure) for rank, failure in failures.items()}
        failure = SessionFailure(self._last_step, packed)
        end.fail(self._number, failure)
        raise SessionFailedError(failure)

    def confirm(self) -> None:
        """Raise if a rank has taken this one for dead."""
        assert isinstance(self._end, CoordinatorEnd)
        with _raising_for_all():
            self._end.raise_if_given_up(self._number, self._last_step)

    def others_at_work(self) -> bool:
        """Ask the record of the coordinator; another rank knows of none."""
        return isinstance(self._end, CoordinatorEnd) and self._end.others_at_work(self._number)

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the session for this rank, or for all if it leaves by an error of its own."""
        if not self._abandon.alive:
            return
        failures = None
        if error is not None and not isinstance(error, Exception):
            name = f"{type(error).__name__}({error})" if error.args else type(error).__name__
            failures = lost_rank(self.rank, f"it was interrupted by {name}")
        elif error is not None and not isinstance(error, CheckpointException):
            portable = portable_failure((error, traceback.extract_tb(trace)))
            failures = {self.rank: PackedFailure.of(portable)}
        if failures is None:
            self._end.end(self._number, self._timeout)
        else:
            self._end.abort(self._number, SessionFailure(self._last_step, failures))
        self._abandon.detach()
