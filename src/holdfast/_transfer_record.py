"""The words for what a save or load did, by phase and rank: small records that are data only."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from holdfast._human_units import rate_text, seconds_text, size_text

TransferKind: TypeAlias = Literal["save", "load"]
TransferMode: TypeAlias = Literal["blocking", "thread", "process"]

RETRY = "retry"
"""The event of a request to a storage that failed and was made again."""

_TRANSFERS = ("write", "read")
"""The phases whose bytes are those of the checkpoint."""


@dataclass(frozen=True)
class PhaseTime:
    """One phase of a save or load on one rank. A rank is in exactly one phase at any time.

    Attributes:
        name: Which phase.
        start: When it began, in seconds after this rank's call.
        seconds: How long it took, waiting included.
        waited: How many of these seconds the rank waited for other ranks, or for earlier saves.
        nbytes: The bytes that it moved; 0 for phases that move none.
    """

    name: str
    start: float
    seconds: float
    waited: float = 0.0
    nbytes: int = 0

    @property
    def busy(self) -> float:
        """The seconds in which the rank did not wait for others."""
        return max(0.0, self.seconds - self.waited)

    @property
    def rate(self) -> float:
        """Bytes a second of the busy time; 0 if no bytes were moved."""
        return self.nbytes / self.busy if self.nbytes and self.busy > 0 else 0.0


@dataclass(frozen=True)
class RankRecord:
    """What one rank did.

    Attributes:
        rank: The rank.
        start: When it called, in seconds after the call of the rank that called first. Found from messages
            that all ranks get at the same time, not from clocks: it is right within the time of a message.
        phases: Its phases, one after the other and without gaps.
        stall: How many seconds the call kept the trainer. For a save in the background that is the time of
            the call itself.
        events: How often something happened that should not be needed, such as "retry".
    """

    rank: int
    start: float
    phases: tuple[PhaseTime, ...]
    stall: float
    events: Mapping[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From this rank's call to its end: the sum of its phases."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def waited(self) -> float:
        """How long this rank waited for others, in all phases."""
        return sum(phase.waited for phase in self.phases)

    @property
    def nbytes(self) -> int:
        """The bytes of the checkpoint that this rank wrote or read."""
        return sum(phase.nbytes for phase in self.phases if phase.name in _TRANSFERS)

    def phase(self, name: str) -> PhaseTime | None:
        """The phase of a name; None if the rank had none."""
        return next((phase for phase in self.phases if phase.name == name), None)


@dataclass(frozen=True)
class PhaseSummary:
    """One phase over all ranks. Seconds are busy ones: without waiting for others.

    Attributes:
        name: Which phase.
        nbytes: The bytes that all ranks moved in it.
        shortest: The busy seconds of the quickest rank.
        median: Those of the rank in the middle; of the quicker one if there are two in the middle.
        longest: Those of the slowest rank.
        slowest_rank: Which rank that was.
        waited: The longest time that any rank waited for others in this phase.
    """

    name: str
    nbytes: int
    shortest: float
    median: float
    longest: float
    slowest_rank: int
    waited: float


class SlowestRank(NamedTuple):
    """The rank, and its phase, that held all others up the most.

    Attributes:
        rank: The rank.
        phase: The phase in which it was slower than others.
        seconds: Its busy seconds in that phase.
        median: Those of the rank in the middle.
    """

    rank: int
    phase: str
    seconds: float
    median: float


@dataclass(frozen=True)
class TransferRecord:
    """What one save or load did.

    Attributes:
        kind: "save" or "load".
        place: Where the checkpoint is, as the caller named it.
        mode: "blocking", or where a save in the background did its work: "thread" or "process".
        started_at: When the rank that made this record called, in seconds since 1970 (UTC).
        rank: The rank that made this record.
        world_size: How many ranks took part.
        seconds: From that rank's call to its end.
        nbytes: The bytes that all ranks wrote or read.
        phases: Each phase over all ranks, in their order.
        ranks: Each rank by itself. The coordinator has all of them, and so has the manifest. Another rank
            has itself and, if there are many ranks, of the others only the slowest of each phase.
        events: How often something happened that should not be needed, on all ranks.
    """

    kind: TransferKind
    place: str
    mode: TransferMode
    started_at: float
    rank: int
    world_size: int
    seconds: float
    nbytes: int
    phases: tuple[PhaseSummary, ...]
    ranks: Sequence[RankRecord]
    events: Mapping[str, int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Bytes a second, of all ranks together, over the whole time."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def stall(self) -> float:
        """How many seconds the call kept the trainer on the rank that made this record."""
        mine = self.of_rank(self.rank)
        return self.seconds if mine is None else mine.stall

    @property
    def retries(self) -> int:
        """How many requests to the storage failed and were made again, on all ranks."""
        return self.events.get(RETRY, 0)

    @property
    def fallbacks(self) -> dict[str, int]:
        """How often a slower way was taken because the better one was refused, by what it was."""
        return {name: count for name, count in self.events.items() if name != RETRY}

    @property
    def slowest(self) -> SlowestRank | None:
        """The rank and phase that cost the others most; None if there is no phase."""
        if not self.phases:
            return None
        alone = self.world_size == 1
        phase = max(self.phases, key=lambda phase: phase.longest - (0.0 if alone else phase.median))
        return SlowestRank(phase.slowest_rank, phase.name, phase.longest, phase.median)

    def of_rank(self, rank: int) -> RankRecord | None:
        """The record of one rank; None if this record does not have it."""
        return next((found for found in self.ranks if found.rank == rank), None)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data, for ``json.dumps``."""
        plain = asdict(self)
        slowest = self.slowest
        plain.update(
            rate=self.rate,
            stall=self.stall,
            phases=[asdict(phase) for phase in self.phases],
            ranks=[asdict(rank) for rank in self.ranks],
            slowest=None if slowest is None else slowest._asdict(),
        )
        return plain

    def __str__(self) -> str:
        done = "saved" if self.kind == "save" else "loaded"
        text = (
            f"{done} {self.place}: {size_text(self.nbytes)} in {seconds_text(self.seconds)} "
            f"({rate_text(self.rate)})"
        )
        if self.mode != "blocking":
            text += f", of which the trainer waited {seconds_text(self.stall)}"
        slowest = self.slowest
        if self.world_size > 1 and slowest is not None:
            text += (
                f"; slowest of {self.world_size} ranks: rank {slowest.rank} in {slowest.phase!r}, "
                f"{seconds_text(slowest.seconds)} (median {seconds_text(slowest.median)})"
            )
        events = ", ".join(f"{count} x {name}" for name, count in self.events.items())
        return f"{text}; {events}" if events else text


def summarize(ranks: Sequence[RankRecord]) -> tuple[PhaseSummary, ...]:
    """Each phase over some ranks, in the order in which they come."""
    by_name: dict[str, list[tuple[int, PhaseTime]]] = {}
    for rank in ranks:
        for phase in rank.phases:
            by_name.setdefault(phase.name, []).append((rank.rank, phase))
    return tuple(_summary(name, phases) for name, phases in by_name.items())


def _summary(name: str, phases: list[tuple[int, PhaseTime]]) -> PhaseSummary:
    busy = [phase.busy for _, phase in phases]
    longest = max(busy)
    return PhaseSummary(
        name,
        nbytes=sum(phase.nbytes for _, phase in phases),
        shortest=min(busy),
        median=sorted(busy)[(len(busy) - 1) // 2],
        longest=longest,
        slowest_rank=phases[busy.index(longest)][0],
        waited=max(phase.waited for _, phase in phases),
    )


def events_of(ranks: Iterable[RankRecord]) -> dict[str, int]:
    """The events of some ranks together."""
    counts: Counter[str] = Counter()
    for rank in ranks:
        counts.update(rank.events)
    return dict(counts)
