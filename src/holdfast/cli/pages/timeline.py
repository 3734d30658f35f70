"""Owns the picture of a save: what each rank did when, how long it waited, and who was slow."""

import math
from typing import NamedTuple

from holdfast._human_units import rate_text, seconds_text, size_text
from holdfast._transfer_record import PhaseTime, RankRecord, TransferRecord
from holdfast.cli.pages.colours import phase_colour
from holdfast.cli.pages.svg import box, drawing, element, line, text

__all__ = ["Straggler", "stragglers", "timeline"]

_ROW = 22.0
_TOP = 20.0
_MOST_RANKS = 32
_LABEL = 0.17
"""The share of the width that the names of ranks take."""


_LEAST = 0.05
"""Seconds that nobody would miss."""


class Straggler(NamedTuple):
    """A rank that was much slower than the others in a phase.

    Attributes:
        rank: The rank.
        phase: The phase.
        seconds: How long it was busy there.
        median: How long the rank in the middle was.
    """

    rank: int
    phase: str
    seconds: float
    median: float


def stragglers(record: TransferRecord) -> list[Straggler]:
    """The ranks that were much slower than the others, and in which phase; the most costly first.

    Much is half as long again as the median, and above it by a tenth of the whole time and 50 milliseconds.
    """
    if record.world_size < 2:
        return []
    medians = {phase.name: phase.median for phase in record.phases}
    slow = [
        Straggler(rank.rank, phase.name, phase.busy, medians[phase.name])
        for rank in record.ranks
        for phase in rank.phases
        # Only the coordinator commits, so that nobody else can be quicker.
        if phase.name in medians
        and phase.name != "commit"
        and phase.busy > 1.5 * medians[phase.name]
        and phase.busy - medians[phase.name] > max(0.1 * record.seconds, _LEAST)
    ]
    return sorted(slow, key=lambda one: one.median - one.seconds)


def timeline(record: TransferRecord, slow: list[Straggler]) -> str:
    """A bar for each rank, with its phases. Waiting for others is drawn pale, at the end of its phase.

    Args:
        record: What the ranks did.
        slow: What is marked.
    """
    ranks = list(record.ranks)
    end = max((rank.start + rank.seconds for rank in ranks), default=0.0)
    if end <= 0:
        return ""
    marked = {(one.rank, one.phase) for one in slow}
    shown = _shown(ranks, {rank for rank, _ in marked})
    height = _TOP + _ROW * len(shown)
    shapes = _scale(end, height)
    for number, rank in enumerate(shown):
        shapes += _row(rank, _TOP + number * _ROW, end, {name for of, name in marked if of == rank.rank})
    label = f"what each rank did during the {record.kind}, over {seconds_text(end)}"
    drawn = drawing("".join(shapes), height, label=label)
    if len(shown) == len(ranks):
        return drawn
    more = f"{len(ranks) - len(shown):,} more ranks are not drawn: these are the slowest, and the first."
    return drawn + element("p", more, class_="dim")


def _shown(ranks: list[RankRecord], marked: set[int]) -> list[RankRecord]:
    """The ranks that are drawn, in their order: all, or the slow ones and the first."""
    if len(ranks) <= _MOST_RANKS:
        return ranks
    busiest = sorted(ranks, key=lambda rank: (rank.rank not in marked, rank.waited - rank.seconds))
    chosen = {rank.rank for rank in busiest[: _MOST_RANKS // 2]}
    for rank in ranks:
        if len(chosen) >= _MOST_RANKS:
            break
        chosen.add(rank.rank)
    return [rank for rank in ranks if rank.rank in chosen]


def _scale(end: float, height: float) -> list[str]:
    step = _round_step(end / 5)
    shapes = []
    for number in range(int(end / step) + 1):
        at = _place(number * step, end)
        anchor = "start" if number == 0 else "end" if at > 0.92 else "middle"
        shapes += [
            line(at, _TOP - 4, at, height, kind="grid"),
            text(f"{number * step:g} s", at, 11, kind="dim", anchor=anchor),
        ]
    return shapes


def _round_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, not below ``rough``."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)


def _place(seconds: float, end: float) -> float:
    return _LABEL + (1 - _LABEL) * seconds / end


def _row(rank: RankRecord, top: float, end: float, marked: set[str]) -> list[str]:
    shapes = [text(f"rank {rank.rank}", 0, top + 14, kind="mark" if marked else None)]
    width = (1 - _LABEL) / end
    for phase in rank.phases:
        start = rank.start + phase.start
        colour, hint = phase_colour(phase.name), _hint(rank, phase)
        kind = f"bar {colour}{' slow' if phase.name in marked else ''}"
        shapes.append(box(_place(start, end), top + 3, phase.busy * width, _ROW - 7, kind=kind, hint=hint))
        if phase.waited > 0:
            left = _place(start + phase.busy, end)
            shapes.append(
                box(left, top + 3, phase.waited * width, _ROW - 7, kind=f"wait {colour}", hint=hint)
            )
    return shapes


def _hint(rank: RankRecord, phase: PhaseTime) -> str:
    said = f"rank {rank.rank}: {phase.name}\n{seconds_text(phase.seconds)}"
    if phase.waited > 0:
        said += f", of which {seconds_text(phase.waited)} waiting for others"
    if phase.nbytes:
        said += f"\n{size_text(phase.nbytes)}, {rate_text(phase.rate)}"
    return said
