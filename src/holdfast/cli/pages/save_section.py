"""Owns the part of a page that tells how a save went: the timeline, its stragglers, and the phases."""

from holdfast._human_units import seconds_text, size_text
from holdfast._transfer_record import TransferRecord
from holdfast.cli.pages.colours import phase_colour
from holdfast.cli.pages.page import legend, section, table
from holdfast.cli.pages.timeline import Straggler, stragglers, timeline

__all__ = ["save_section"]

_HEAD = ("phase", "bytes", "fastest rank", "median", "slowest rank", "", "longest wait")


def save_section(record: TransferRecord) -> str:
    """The section.

    Args:
        record: What the save did, with its ranks.
    """
    slow = stragglers(record)
    events = ", ".join(f"{count:,} x {name}" for name, count in record.events.items())
    rows = [
        (
            phase.name,
            size_text(phase.nbytes) if phase.nbytes else "",
            seconds_text(phase.shortest),
            seconds_text(phase.median),
            seconds_text(phase.longest),
            f"rank {phase.slowest_rank}",
            seconds_text(phase.waited),
        )
        for phase in record.phases
    ]
    return section(
        "How the save went",
        _about(record, slow) + (f" Also: {events}." if events else ""),
        legend(
            [
                *((phase.name, phase_colour(phase.name)) for phase in record.phases),
                ("waiting for other ranks", "waiting"),
            ]
        ),
        timeline(record, slow),
        table(_HEAD, rows, keys=(), numbers=(1, 2, 3, 4, 6)),
    )


def _about(record: TransferRecord, slow: list[Straggler]) -> str:
    if record.world_size == 1:
        return ""
    if not slow:
        return "No rank was much slower than the others."
    first = slow[0]
    said = (
        f"Rank {first.rank} was slow: {seconds_text(first.seconds)} in '{first.phase}', where the median is "
        f"{seconds_text(first.median)}."
    )
    others = sorted({one.rank for one in slow} - {first.rank})
    if not others:
        return said
    named = ", ".join(map(str, others[:5])) + (f" and {len(others) - 5:,} more" if len(others) > 5 else "")
    return f"{said} Also slow: rank{'s' if len(others) > 1 else ''} {named}."
