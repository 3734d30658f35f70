"""Owns bars: how bytes are spread over dtypes, files and ranks."""

from collections.abc import Sequence
from typing import NamedTuple

from holdfast._human_units import size_text
from holdfast.cli.pages.svg import box, drawing, text

__all__ = ["Bar", "bars"]

_ROW = 34.0


class Bar(NamedTuple):
    """One bar.

    Attributes:
        name: What it is.
        nbytes: How long it is.
        note: What stands behind its size.
        colour: Its class.
    """

    name: str
    nbytes: int
    note: str = ""
    colour: str = "c0"


def bars(rows: Sequence[Bar], *, most: int, label: str) -> str:
    """The rows as bars of one scale. Those beyond ``most`` are left to one line of text.

    Args:
        rows: The bars, the most important first.
        most: How many are drawn.
        label: What they show, for those who cannot see them.
    """
    longest = max((row.nbytes for row in rows), default=0)
    shapes = []
    for number, row in enumerate(rows[:most]):
        top = number * _ROW
        said = f"{size_text(row.nbytes)}{f', {row.note}' if row.note else ''}"
        shapes += [
            text(row.name, 0, top + 12),
            text(said, 1, top + 12, kind="dim", anchor="end"),
            box(0, top + 17, 1, 9, kind="track", corner=3),
            box(0, top + 17, row.nbytes / longest if longest else 0, 9, kind=f"bar {row.colour}", corner=3),
        ]
    drawn = drawing("".join(shapes), _ROW * min(len(rows), most), label=label)
    left = rows[most:]
    if not left:
        return drawn
    return f'{drawn}<p class="dim">{len(left):,} more, with {size_text(sum(row.nbytes for row in left))}.</p>'
