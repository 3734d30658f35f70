"""The record of a save as the manifest keeps it: each phase over all ranks, and a few columns by rank.

A rank takes about 12 bytes, and 16 for each phase: 10,000 ranks are 0.8 MB.
"""

from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

import msgspec

from holdfast._deferred import DeferredList
from holdfast._format.description import column
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
        **_copied_fields(record),
        phases=[astuple(phase) for phase in record.phases],
        ranks=column([row.rank for row in rows], "I"),
        rank_starts=column([row.start for row in rows], "f"),
        rank_stalls=column([row.stall for row in rows], "f"),
        phase_seconds=column([cell.seconds for cell in cells], "f"),
        phase_waited=column([cell.waited for cell in cells], "f"),
        phase_nbytes=column([cell.nbytes for cell in cells], "q"),
        events=[(row.rank, name, count) for row in rows for name, count in row.events.items()],
    )


def _copied_fields(record: "TransferRecord | StoredRecord") -> dict[str, Any]:
    """The fields that both forms of a record have."""
    names = ("kind", "mode", "started_at", "rank", "world_size", "seconds", "nbytes")
    return {name: getattr(record, name) for name in names}


def open_record(stored: StoredRecord, place: str) -> TransferRecord:
    """The record of a manifest. What each rank did is worked out when somebody looks at it.

    Args:
        stored: What the manifest has.
        place: Where the checkpoint was saved to.
    """
    counted = [RankRecord(rank, 0.0, (), 0.0, {name: count}) for rank, name, count in stored.events]
    return TransferRecord(
        **_copied_fields(stored),
        place=place,
        phases=tuple(PhaseSummary(*phase) for phase in stored.phases),
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
