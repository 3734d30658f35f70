"""Owns curves: one number of each step of a run."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from holdfast.cli.pages.svg import box, drawing, element, line, percent, text

__all__ = ["curve"]

_HEIGHT, _TOP, _BOTTOM = 150.0, 22.0, 22.0
_LEFT, _RIGHT = 0.02, 0.98
_MOST = 400
"""How many points are drawn: more are closer to each other than pixels."""


def curve(points: Sequence[tuple[int, float]], value_text: Callable[[float], str], *, label: str) -> str:
    """Points, joined by lines; the highest and the lowest value are written down.

    Args:
        points: Steps, in their order, each with its value.
        value_text: How a value is written.
        label: What they show, for those who cannot see them.
    """
    points = points[:: -(-len(points) // _MOST)] if points else points
    if not points:
        return ""
    steps, values = [step for step, _ in points], [value for _, value in points]
    lowest, highest = min(values), max(values)
    if value_text(lowest) == value_text(highest):
        # What nobody could read is not drawn as a difference.
        lowest = highest

    def across(step: int) -> float:
        first, last = min(steps), max(steps)
        return _LEFT + (_RIGHT - _LEFT) * ((step - first) / (last - first) if last > first else 0.5)

    def down(value: float) -> float:
        share = (highest - value) / (highest - lowest) if highest > lowest else 0.5
        return _TOP + share * (_HEIGHT - _TOP - _BOTTOM)

    shapes = [box(0, _TOP - 6, 1, _HEIGHT - _TOP - _BOTTOM + 12, kind="track", corner=4)]
    places = [(across(step), down(value)) for step, value in points]
    shapes += [line(*one, *other, kind="curve") for one, other in pairwise(places)]
    for (left, top), (step, value) in zip(places, points, strict=True):
        hint = element("title", f"step {step}: {value_text(value)}")
        shapes.append(element("circle", hint, cx=percent(left), cy=f"{top:.1f}", r=3, class_="c0"))
    newest = f"newest: {value_text(values[-1])}"
    span = f"{value_text(lowest)} to {value_text(highest)}" if highest > lowest else ""
    shapes += [
        text(newest, 0, 11),
        text(span, 1, 11, kind="dim", anchor="end"),
        text(f"step {steps[0]}", 0, _HEIGHT - 4, kind="dim"),
        text(f"step {steps[-1]}" if len(steps) > 1 else "", 1, _HEIGHT - 4, kind="dim", anchor="end"),
    ]
    return drawing("".join(shapes), _HEIGHT, label=label)
