"""Makes the record of a save or load: measures on each rank, and joins what the ranks have measured.

Ranks send their times with messages that they send anyway: the coordinator gets all of them with the results
of the last step, and answers with what all ranks together did.
"""

import dataclasses
from collections.abc import Sequence

from holdfast._phase_clock import PhaseClock
from holdfast._transfer_record import (
    PhaseTime,
    RankRecord,
    TransferKind,
    TransferMode,
    TransferRecord,
    events_of,
    summarize,
)

_MOST_SENT = 64
"""With more ranks than this, ranks other than the coordinator are told of the slowest ones only: rows of all
ranks for all ranks would be gigabytes with 10,000 of them."""

_ALL_BEGIN_AFTER = "plan"
"""The phase at whose end all ranks get an answer of the coordinator at the same time."""


class TransferRecorder:
    """Collects the record of one save or load.

    Attributes:
        clock: Measures this rank.
        at_commit: On the coordinator: what all ranks had done when the commit began. The manifest keeps it.
        stall: For how long the trainer was kept; None as long as that is not over.
        events: Where it is counted how often something happened on this rank that should not be needed.
    """

    def __init__(self, kind: TransferKind, place: str = "", mode: TransferMode = "blocking") -> None:
        self.clock = PhaseClock()
        self.stall: float | None = None
        self.events: dict[str, int] = {}
        self.at_commit: TransferRecord | None = None
        self._kind: TransferKind = kind
        self._place = place
        self._mode: TransferMode = mode
        self._rank = 0
        self._world_size = 1
        self._others: list[RankRecord] = []
        self._told: TransferRecord | None = None

    def set_up(self, rank: int, world_size: int, events: dict[str, int]) -> None:
        """Learn which rank this is, and where its events are counted."""
        self._rank, self._world_size, self.events = rank, world_size, events

    def release_caller(self) -> None:
        """From now on the trainer does not wait for this any more."""
        self.stall = self.clock.seconds

    def mine(self) -> RankRecord:
        """The record of this rank until now."""
        phases = self.clock.phases()
        seconds = sum(phase.seconds for phase in phases)
        stall = seconds if self.stall is None else self.stall
        return RankRecord(self._rank, 0.0, phases, stall, dict(self.events))

    def gather(self, sent: Sequence[RankRecord]) -> None:
        """On the coordinator: take what all ranks have sent, in their last step, until now."""
        mine = self.mine()
        self._others = [_aligned(row, mine, self._mode) for row in sent if row.rank != self._rank]

    def commit_begins(self) -> None:
        """On the coordinator: all ranks have written, and wait for the commit."""
        self.at_commit = self.record()
        self.clock.enter("commit")

    def to_tell(self) -> tuple[TransferRecord, float]:
        """On the coordinator: what the other ranks are told, and how long they have waited for the commit."""
        phases = self.clock.phases()
        last = phases[-1]
        seconds = last.seconds if last.name == "commit" else 0.0
        if seconds:
            self._others = [_with_commit(row, seconds, self._mode) for row in self._others]
        whole = self.record()
        if self._world_size > _MOST_SENT:
            slowest = {phase.slowest_rank for phase in whole.phases}
            whole = dataclasses.replace(whole, ranks=[row for row in whole.ranks if row.rank in slowest])
        return whole, seconds

    def learn(self, told: tuple[TransferRecord, float]) -> None:
        """On the other ranks: take what the coordinator has told."""
        record, seconds = told
        if seconds:
            self.clock.enter_earlier("commit", seconds)
        self._told = record

    def record(self) -> TransferRecord:
        """The record as far as it is known on this rank now."""
        mine, told = self.mine(), self._told
        if told is None:
            rows = sorted([mine, *self._others], key=lambda row: row.rank)
            phases, events = summarize(rows), events_of(rows)
            nbytes = sum(row.nbytes for row in rows)
        else:
            known = next((row for row in told.ranks if row.rank == self._rank), None)
            placed = dataclasses.replace(mine, start=known.start if known else 0.0)
            rows = sorted(
                [placed, *(row for row in told.ranks if row is not known)], key=lambda row: row.rank
            )
            # What comes after the last message, each rank knows of itself only.
            common = {phase.name for phase in told.phases}
            later = (phase for phase in summarize([mine]) if phase.name not in common)
            phases, events, nbytes = (*told.phases, *later), dict(told.events), told.nbytes
        return TransferRecord(
            kind=self._kind,
            place=self._place,
            mode=self._mode,
            started_at=self.clock.started_at,
            rank=self._rank,
            world_size=self._world_size,
            seconds=mine.seconds,
            nbytes=nbytes,
            phases=phases,
            ranks=_from_zero(rows),
            events=events,
        )


def _aligned(row: RankRecord, mine: RankRecord, mode: TransferMode) -> RankRecord:
    """The record of another rank, on the time line of the coordinator, and until now.

    All ranks begin their last step when the coordinator's answer to the plans comes. Since it has sent its
    row, the other rank has waited.
    """
    start = _end_of_plan(mine) - _end_of_plan(row)
    waited = max(0.0, mine.seconds - start - row.seconds)
    last = row.phases[-1]
    longer = dataclasses.replace(last, seconds=last.seconds + waited, waited=last.waited + waited)
    return _made(row, start, (*row.phases[:-1], longer), mode)


def _with_commit(row: RankRecord, seconds: float, mode: TransferMode) -> RankRecord:
    commit = PhaseTime("commit", row.seconds, seconds, seconds)
    return _made(row, row.start, (*row.phases, commit), mode)


def _made(row: RankRecord, start: float, phases: tuple[PhaseTime, ...], mode: TransferMode) -> RankRecord:
    stall = sum(phase.seconds for phase in phases) if mode == "blocking" else row.stall
    return dataclasses.replace(row, start=start, phases=phases, stall=stall)


def _end_of_plan(row: RankRecord) -> float:
    plan = row.phase(_ALL_BEGIN_AFTER)
    return row.seconds if plan is None else plan.start + plan.seconds


def _from_zero(rows: Sequence[RankRecord]) -> list[RankRecord]:
    """The rows with times after the call of the first of them."""
    first = min(row.start for row in rows)
    return [
        row if row.start == first == 0.0 else dataclasses.replace(row, start=row.start - first)
        for row in rows
    ]
