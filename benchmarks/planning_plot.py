"""Growth as a picture: curves over a number that doubles, both axes logarithmic, as SVG without a library."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Curve", "Panel", "draw"]

_WIDTH, _HEIGHT = 460, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 40, 96
_INK, _GRID = "#667", "#6673"


@dataclass(frozen=True)
class Curve:
    """Values over the panel's numbers; drawn in a colour, dashed or not."""

    name: str
    values: Sequence[float]
    colour: str
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One diagram: its title, what the axes show, the numbers along the lower one, and the curves."""

    title: str
    across: str
    upwards: str
    numbers: Sequence[int]
    curves: Sequence[Curve]


def draw(panels: Sequence[Panel]) -> str:
    """The panels beside each other, as the text of an SVG file."""
    width = _WIDTH * len(panels)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" width="{width}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="11" fill="{_INK}">'
    )
    lines = [head]
    for number, panel in enumerate(panels):
        lines += [f'<g transform="translate({_WIDTH * number} 0)">', *_panel_lines(panel), "</g>"]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel_lines(panel: Panel) -> Iterator[str]:
    values = [value for curve in panel.curves for value in curve.values]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    first, last = math.log2(panel.numbers[0]), math.log2(panel.numbers[-1])

    def x(number: float) -> float:
        return _LEFT + (right - _LEFT) * (math.log2(number) - first) / max(last - first, 1)

    def y(value: float) -> float:
        return bottom - (bottom - _TOP) * (math.log10(value) - low) / (high - low)

    yield f'<text x="{_LEFT}" y="20" font-size="13" font-weight="bold">{escape(panel.title)}</text>'
    for power in range(low, high + 1):
        at = y(10.0**power)
        yield f'<path d="M{_LEFT} {at:.1f}H{right}" stroke="{_GRID}"/>'
        yield f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
    for number in panel.numbers:
        yield f'<text x="{x(number):.1f}" y="{bottom + 15}" text-anchor="middle">{number}</text>'
    centre, middle = (_LEFT + right) / 2, (_TOP + bottom) / 2
    yield f'<text x="{centre}" y="{bottom + 31}" text-anchor="middle">{escape(panel.across)}</text>'
    yield (
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">'
        f"{escape(panel.upwards)}</text>"
    )
    for place, curve in enumerate(panel.curves):
        points = " ".join(f"{x(n):.1f},{y(v):.1f}" for n, v in zip(panel.numbers, curve.values, strict=True))
        look = f'stroke="{curve.colour}" stroke-width="2"' + (
            ' stroke-dasharray="5 3"' if curve.dashed else ""
        )
        yield f'<polyline points="{points}" fill="none" {look}/>'
        column, row = place % 2, place // 2
        left, level = _LEFT + 190 * column, bottom + 50 + 15 * row
        yield f'<path d="M{left} {level - 4}h22" fill="none" {look}/>'
        yield f'<text x="{left + 28}" y="{level}">{escape(curve.name)}</text>'
