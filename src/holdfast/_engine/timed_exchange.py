"""An exchange that measures how long this rank waits for others."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from holdfast._phase_clock import PhaseClock
from holdfast._ranks.broadcast import Broadcast
from holdfast._ranks.exchange import Exchange, do_nothing

T = TypeVar("T")
R = TypeVar("R")


class TimedExchange(Exchange):
    """Another exchange, whose steps tell a clock when this rank begins and ends to wait.

    A rank waits from the end of its part of a step until it gets its answer; the coordinator does not wait
    while it decides. ``outcome_is_known`` must be asked of the other exchange.
    """

    def __init__(self, inner: Exchange, clock: PhaseClock) -> None:
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.group_size = inner.group_size
        self.is_coordinator = inner.is_coordinator
        self.can_broadcast = inner.can_broadcast
        self._inner = inner
        self._clock = clock

    def decide(self, step: str, part: Callable[[], T], decision: Callable[[list[T]], Sequence[R]]) -> R:
        """Take a step of the other exchange."""

        def timed_part() -> T:
            try:
                return part()
            finally:
                self._clock.begin_wait()

        def timed_decision(parts: list[T]) -> Sequence[R]:
            self._clock.end_wait()
            try:
                return decision(parts)
            finally:
                self._clock.begin_wait()

        try:
            return self._inner.decide(step, timed_part, timed_decision)
        finally:
            self._clock.end_wait()

    def share(self, step: str, produce: Callable[[], R]) -> R:
        """Take a step of the other exchange in which only the coordinator does something."""

        def timed_produce() -> R:
            self._clock.end_wait()
            try:
                return produce()
            finally:
                self._clock.begin_wait()

        self._clock.begin_wait()
        try:
            return self._inner.share(step, timed_produce)
        finally:
            self._clock.end_wait()

    def open_broadcast(self, members: Sequence[int], check: Callable[[], None] = do_nothing) -> Broadcast:
        """Let the other exchange open it."""
        return self._inner.open_broadcast(members, check)

    def confirm(self) -> None:
        """Let the other exchange confirm."""
        self._inner.confirm()
