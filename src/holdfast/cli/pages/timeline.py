"""Owns the picture of a save: what each rank did when, how long it waited, and who was slow."""

import math

from holdfast._human_units import rate_text, seconds_text, size_text
from holdfast._transfer_record import PhaseTime, RankRecord, TransferRecord
from holdfast.cli.pages.colours import phase_colour
from holdfast.cli.pages.svg import box, drawing, element, line, text

__all__ = ["timeline"]

_ROW = 22.0
_TOP = 20.0
_MOST_RANKS = 40
_LABEL = 0.17
"""The share of the width that the names of ranks take."""


def timeline(record: TransferRecord) -> str:
    """A bar for each rank, with its phases. Waiting for others is drawn pale, at the end of its phase."""
    ranks = list(record.ranks)
    end = max((rank.start + rank.seconds for rank in ranks), default=0.0)
    if end <= 0:
        return ""
    slowest = record.slowest
    shown = _shown(ranks, None if slowest is None else slowest.rank)
    height = _TOP + _ROW * len(shown)
    shapes = _scale(end, height)
    for number, rank in enumerate(shown):
        is_slow = slowest is not None and record.world_size > 1 and rank.rank == slowest.rank
        slow_phase = slowest.phase if is_slow and slowest is not None else None
        shapes += _row(rank, _TOP + number * _ROW, end, slow_phase)
    label = f"what each rank did during the {record.kind}, over {seconds_text(end)}"
    drawn = drawing("".join(shapes), height, label=label)
    if len(shown) == len(ranks):
        return drawn
    more = (
        f"{len(ranks) - len(shown):,} more ranks are not drawn: those shown are the busiest, and the first."
    )
    return drawn + element("p", more, class_="dim")


def _shown(ranks: list[RankRecord], slowest: int | None) -> list[RankRecord]:
    """The ranks that are drawn, in their order: all, or the slow ones and the first."""
    if len(ranks) <= _MOST_RANKS:
        return ranks
    busiest = sorted(ranks, key=lambda rank: rank.waited - rank.seconds)[: _MOST_RANKS // 2]
    chosen = {rank.rank for rank in busiest} | ({slowest} if slowest is not None else set())
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
        shapes += [
            line(at, _TOP - 4, at, height, kind="grid"),
            text(f"{number * step:g} s", at, 11, kind="dim", anchor="middle" if number else "start"),
        ]
    return shapes


def _round_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, not below ``rough``."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)


def _place(seconds: float, end: float) -> float:
    return _LABEL + (1 - _LABEL) * seconds / end


def _row(rank: RankRecord, top: float, end: float, slow_phase: str | None) -> list[str]:
    shapes = [text(f"rank {rank.rank}", 0, top + 14, kind="mark" if slow_phase else None)]
    for phase in rank.phases:
        start = rank.start + phase.start
        width = (1 - _LABEL) / end
        hint = _hint(rank, phase)
        shapes.append(
            box(
                _place(start, end),
                top + 3,
                phase.busy * width,
                _ROW - 7,
                kind=f"bar {phase_colour(phase.name)}",
                hint=hint,
            )
        )
        if phase.waited > 0:
            shapes.append(
                box(
                    _place(start + phase.busy, end),
                    top + 3,
                    phase.waited * width,
                    _ROW - 7,
                    kind=f"wait {phase_colour(phase.name)}",
                    hint=f"{hint}\nwaits for others here",
                )
            )
        if phase.name == slow_phase:
            shapes.append(
                box(_place(start, end), top + 3, phase.busy * width, _ROW - 7, kind="slow", hint=hint)
            )
    return shapes


def _hint(rank: RankRecord, phase: PhaseTime) -> str:
    said = f"rank {rank.rank}: {phase.name}\n{seconds_text(phase.seconds)}"
    if phase.waited > 0:
        said += f", of which {seconds_text(phase.waited)} waiting for others"
    if phase.nbytes:
        said += f"\n{size_text(phase.nbytes)}, {rate_text(phase.rate)}"
    return said
