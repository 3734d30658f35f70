"""Measures the phases of a save or load on one rank."""

import time

from holdfast._transfer_record import PhaseTime

__all__ = ["PhaseClock"]


class PhaseClock:
    """Knows in which phase a rank is, since when, and for how long it has waited for others in it.

    At any time the rank is in exactly one phase, so that the phases add up to the whole time. One thread
    at a time may use it. A call takes about a microsecond.

    Args:
        first: The phase that begins now.
    """

    def __init__(self, first: str = "prepare") -> None:
        self.started_at = time.time()
        self._began = self._since = time.perf_counter()
        self._name = first
        self._nbytes = 0
        self._waited = 0.0
        self._waiting_since: float | None = None
        self._ended: list[PhaseTime] = []

    @property
    def seconds(self) -> float:
        """The time since the clock was made."""
        return time.perf_counter() - self._began

    def enter(self, name: str) -> None:
        """Begin a phase, and so end the one before. Does nothing if the rank is in that phase already."""
        if name == self._name:
            return
        now = time.perf_counter()
        self._ended.append(self._current(now))
        self._begin(name, now)

    def count(self, nbytes: int) -> None:
        """Count bytes that the current phase has moved."""
        self._nbytes += nbytes

    def begin_wait(self) -> None:
        """From now on this rank waits for others."""
        if self._waiting_since is None:
            self._waiting_since = time.perf_counter()

    def end_wait(self) -> None:
        """From now on this rank does something again."""
        if self._waiting_since is not None:
            self._waited += time.perf_counter() - self._waiting_since
            self._waiting_since = None

    def enter_earlier(self, name: str, seconds: float) -> None:
        """Begin a phase that really began some seconds ago, while this rank waited."""
        now = time.perf_counter()
        seconds = min(seconds, self._waited)
        self._waited -= seconds
        self._ended.append(self._current(now - seconds))
        self._begin(name, now - seconds)
        self._waited = seconds

    def insert_before(self, name: str, seconds: float) -> None:
        """Count some seconds of the current phase to another one, as if that had come before."""
        seconds = max(0.0, min(seconds, time.perf_counter() - self._since))
        self._ended.append(PhaseTime(name, self._since - self._began, seconds))
        self._since += seconds

    def phases(self) -> tuple[PhaseTime, ...]:
        """The phases until now; the last one is the current one, as far as it has come."""
        return (*self._ended, self._current(time.perf_counter()))

    def _begin(self, name: str, now: float) -> None:
        self._name, self._since, self._nbytes, self._waited = name, now, 0, 0.0
        if self._waiting_since is not None:
            self._waiting_since = now

    def _current(self, now: float) -> PhaseTime:
        waited = self._waited
        if self._waiting_since is not None:
            waited += now - self._waiting_since
        return PhaseTime(self._name, self._since - self._began, now - self._since, waited, self._nbytes)
