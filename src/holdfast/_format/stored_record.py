"""The record of a save as the manifest keeps it: each phase over all ranks, and a few columns by rank.

A rank takes about 12 bytes, and 16 for each phase: 10,000 ranks are 0.8 MB.
"""

from array import array
from collections.abc import Iterator
from typing import Any

import msgspec

from holdfast._deferred import DeferredList
from holdfast._transfer_record import PhaseSummary, PhaseTime, RankRecord, TransferRecord, events_of

_NONE = -1.0
"""Stands in the column of seconds where a rank had no such phase."""


class StoredRecord(msgspec.Struct, kw_only=True):
    """A record as columns, little-endian; ``docs/format.md`` describes each field.

    ``phase_*`` have a value for each phase and rank: those of the first phase for all ranks, then those of
    the second, and so on.
    """

    kind: str
    mode: str
    started_at: float
    rank: int
    world_size: int
    seconds: float
    nbytes: int
    phases: list[tuple[str, int, float, float, float, int, float]]
    ranks: bytes
    rank_starts: bytes
    rank_stalls: bytes
    phase_seconds: bytes
    phase_waited: bytes
    phase_nbytes: bytes
    events: list[tuple[int, str, int]] = msgspec.field(default_factory=list)

    def find_problem(self) -> str | None:
        """What is wrong with the columns; None if they fit together."""
        count = len(self.ranks) // 4
        cells = count * len(self.phases)
        wanted = {
            "ranks": 4 * count,
            "rank_starts": 4 * count,
            "rank_stalls": 4 * count,
            "phase_seconds": 4 * cells,
            "phase_waited": 4 * cells,
            "phase_nbytes": 8 * cells,
        }
        bad = next((name for name, length in wanted.items() if len(getattr(self, name)) != length), None)
        return None if bad is None else f"the column {bad} of its record has another length than the others"


def store_record(record: TransferRecord) -> StoredRecord:
    """The record as the manifest keeps it."""
    rows = list(record.ranks)
    names = [phase.name for phase in record.phases]
    table = [{phase.name: phase for phase in row.phases} for row in rows]
    missing = PhaseTime("", 0.0, _NONE)
    cells = [of_rank.get(name, missing) for name in names for of_rank in table]
    return StoredRecord(
        kind=record.kind,
        mode=record.mode,
        started_at=record.started_at,
        rank=record.rank,
        world_size=record.world_size,
        seconds=record.seconds,
        nbytes=record.nbytes,
        phases=[
            (
                phase.name,
                phase.nbytes,
                phase.shortest,
                phase.median,
                phase.longest,
                phase.slowest_rank,
                phase.waited,
            )
            for phase in record.phases
        ],
        ranks=array("I", [row.rank for row in rows]).tobytes(),
        rank_starts=array("f", [row.start for row in rows]).tobytes(),
        rank_stalls=array("f", [row.stall for row in rows]).tobytes(),
        phase_seconds=array("f", [cell.seconds for cell in cells]).tobytes(),
        phase_waited=array("f", [cell.waited for cell in cells]).tobytes(),
        phase_nbytes=array("q", [cell.nbytes for cell in cells]).tobytes(),
        events=[(row.rank, name, count) for row in rows for name, count in row.events.items()],
    )


def open_record(stored: StoredRecord, place: str) -> TransferRecord:
    """The record of a manifest. What each rank did is worked out when somebody looks at it.

    Args:
        stored: What the manifest has.
        place: Where the checkpoint was saved to.
    """
    phases = tuple(PhaseSummary(*phase) for phase in stored.phases)
    counted = [RankRecord(rank, 0.0, (), 0.0, {name: count}) for rank, name, count in stored.events]
    kind: Any = stored.kind
    mode: Any = stored.mode
    return TransferRecord(
        kind=kind,
        place=place,
        mode=mode,
        started_at=stored.started_at,
        rank=stored.rank,
        world_size=stored.world_size,
        seconds=stored.seconds,
        nbytes=stored.nbytes,
        phases=phases,
        ranks=DeferredList(len(stored.ranks) // 4, lambda: _rows(stored)),
        events=events_of(counted),
    )


def _rows(stored: StoredRecord) -> Iterator[RankRecord]:
    ranks = memoryview(stored.ranks).cast("I")
    starts, stalls = memoryview(stored.rank_starts).cast("f"), memoryview(stored.rank_stalls).cast("f")
    seconds = memoryview(stored.phase_seconds).cast("f")
    waited = memoryview(stored.phase_waited).cast("f")
    nbytes = memoryview(stored.phase_nbytes).cast("q")
    events: dict[int, dict[str, int]] = {}
    for rank, name, count in stored.events:
        events.setdefault(rank, {})[name] = count
    for row, rank in enumerate(ranks):
        phases: list[PhaseTime] = []
        at = 0.0
        for number, phase in enumerate(stored.phases):
            cell = number * len(ranks) + row
            if seconds[cell] >= 0:
                phases.append(PhaseTime(phase[0], at, seconds[cell], waited[cell], nbytes[cell]))
                at += seconds[cell]
        yield RankRecord(rank, starts[row], tuple(phases), stalls[row], events.get(rank, {}))
