"""A record as a trace in the JSON format of Chrome, which Perfetto opens."""

from typing import Any

from holdfast._transfer_record import RankRecord, TransferRecord

_MICRO = 1e6
_WHOLE = ("kind", "place", "mode", "started_at", "world_size", "nbytes", "seconds", "slowest", "events")
"""What the trace tells of the record as a whole."""

_PHASES, _WAITS = 0, 1
"""The two rows of a rank: what it did, and when it waited for others."""


def chrome_trace(record: TransferRecord) -> dict[str, Any]:
    """The record as a trace: a process for each rank, a slice for each phase, and one for each wait.

    Times are microseconds after the call of the first rank. A phase does not say when in it the rank waited:
    the wait is drawn at its end, where ranks wait for the slowest.
    """
    slowest = record.slowest
    events: list[dict[str, Any]] = []
    for rank in record.ranks:
        events += _names(rank, is_slowest=slowest is not None and rank.rank == slowest.rank)
        events += _slices(rank)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {name: value for name, value in record.as_dict().items() if name in _WHOLE},
    }


def _names(rank: RankRecord, *, is_slowest: bool) -> list[dict[str, Any]]:
    name = f"rank {rank.rank} (slowest)" if is_slowest else f"rank {rank.rank}"
    named: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", _PHASES, {"name": name}),
        ("process_sort_index", _PHASES, {"sort_index": rank.rank}),
        ("thread_name", _PHASES, {"name": "phases"}),
        ("thread_name", _WAITS, {"name": "waits for others"}),
    ]
    return [
        {"ph": "M", "pid": rank.rank, "tid": row, "name": kind, "args": args} for kind, row, args in named
    ]


def _slices(rank: RankRecord) -> list[dict[str, Any]]:
    slices: list[dict[str, Any]] = []
    for phase in rank.phases:
        start = rank.start + phase.start
        arguments = {
            "seconds": phase.seconds,
            "waited": phase.waited,
            "nbytes": phase.nbytes,
            "rate": phase.rate,
        }
        slices.append(_slice(rank.rank, _PHASES, phase.name, start, phase.seconds, arguments))
        if phase.waited > 0:
            begin = start + phase.seconds - phase.waited
            slices.append(_slice(rank.rank, _WAITS, f"waits in {phase.name}", begin, phase.waited, {}))
    return slices


def _slice(
    rank: int, row: int, name: str, start: float, seconds: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": rank,
        "tid": row,
        "cat": "holdfast",
        "name": name,
        "ts": round(start * _MICRO, 3),
        "dur": round(seconds * _MICRO, 3),
        "args": arguments,
    }
