"""Owns the picture of what takes how much: a rectangle for each module, as large as its bytes."""

import heapq
import itertools
from collections.abc import Sequence

from holdfast._human_units import size_text
from holdfast.cli.pages.page import legend
from holdfast.cli.pages.svg import box, drawing, nested, text
from holdfast.cli.tree import Node

__all__ = ["treemap"]

_HEIGHT = 420.0
_WIDTH = 960.0
"""The width for which rectangles are made as square as can be; the picture is as wide as its place."""

_MOST = 240
"""How many rectangles are drawn: more could not be told apart, and the page would grow."""

_MOST_PARTS = 100
"""How many parts of one module are drawn."""

_COLOURS = 8
_LETTER = 7.0  # pixels, about
_PHONE = 0.36  # of the width that is drawn for


def treemap(root: Node) -> str:
    """The tree as a drawing. Small parts are drawn as the module that they belong to."""
    prefix = ""
    while len(root.children) == 1:
        (root,) = root.children.values()
        prefix = f"{prefix}{root.label}."
    groups = _parts(root) or [root]
    drawn = _leaves(groups)
    shapes = []
    places = _squarified([group.nbytes for group in groups], 0.0, 0.0, _WIDTH, _HEIGHT)
    for number, (group, place) in enumerate(zip(groups, places, strict=True)):
        # All small groups have the last colour.
        colour = f"c{min(number, _COLOURS - 1)}"
        shapes += _draw(group, f"{prefix}{group.label}", place, drawn, colour)
    names = [
        (f"{prefix}{group.label} {size_text(group.nbytes)}", number) for number, group in enumerate(groups)
    ]
    entries = [(name, f"c{number}") for name, number in names[: _COLOURS - 1]]
    if len(names) >= _COLOURS:
        entries.append(("all others", f"c{_COLOURS - 1}"))
    label = f"bytes by module: {', '.join(name for name, _ in entries)}"
    return legend(entries) + drawing("".join(shapes), _HEIGHT, label=label)


def _parts(node: Node) -> list[Node]:
    """What is below a node and takes space, the largest first; if there is too much, the smallest as one."""
    parts = sorted((below for below in node.children.values() if below.nbytes), key=lambda n: -n.nbytes)
    if len(parts) <= _MOST_PARTS:
        return parts
    others = Node(f"{len(parts) - _MOST_PARTS:,} smaller ones")
    others.nbytes = sum(part.nbytes for part in parts[_MOST_PARTS:])
    others.count = sum(part.count for part in parts[_MOST_PARTS:])
    return [*parts[:_MOST_PARTS], others]


def _leaves(groups: Sequence[Node]) -> set[int]:
    """Which nodes are drawn as one rectangle: the largest is cut into its parts until there are enough."""
    order = itertools.count()
    waiting = [(-node.nbytes, next(order), node) for node in groups]
    heapq.heapify(waiting)
    whole: set[int] = set()
    drawn = len(waiting)
    while waiting:
        _, _, node = heapq.heappop(waiting)
        parts = _parts(node)
        if not parts or drawn + len(parts) - 1 > _MOST:
            whole.add(id(node))
            continue
        drawn += len(parts) - 1
        for part in parts:
            heapq.heappush(waiting, (-part.nbytes, next(order), part))
    return whole


_Place = tuple[float, float, float, float]


def _draw(node: Node, name: str, place: _Place, whole: set[int], colour: str) -> list[str]:
    if id(node) in whole:
        return [_rectangle(node, name, place, colour)]
    parts = _parts(node)
    places = _squarified([part.nbytes for part in parts], *place)
    return [
        shape
        for part, at in zip(parts, places, strict=True)
        for shape in _draw(part, f"{name}.{part.label}", at, whole, colour)
    ]


def _rectangle(node: Node, name: str, place: _Place, colour: str) -> str:
    left, top, width, height = place
    values = "1 value" if node.count == 1 else f"{node.count:,} values"
    shape = box(0, 0, 1, height, kind=f"tile {colour}")
    short, size = _fitting(name, width), size_text(node.nbytes)
    lines = []
    if short and height > 18:
        # On a phone only the widest rectangles have room for letters.
        narrow = "" if _LETTER * len(short) < _PHONE * width else "wide"
        lines.append(text(short, "5", 15, kind=narrow or None))
        if height > 36 and _LETTER * len(size) < width:
            lines.append(text(size, "5", 30, kind=f"dim {narrow}".strip()))
    hint = f"{name}\n{size_text(node.nbytes)}, {values}"
    return nested(shape + "".join(lines), left / _WIDTH, top, width / _WIDTH, height, hint=hint)


def _fitting(name: str, width: float) -> str:
    """As many of the last steps of a name as fit; none if not even the last one does."""
    steps = name.split(".")
    for first in range(len(steps)):
        short = ".".join(steps[first:])
        if _LETTER * len(short) + 8 < width:
            return short
    return ""


def _squarified(sizes: Sequence[int], left: float, top: float, width: float, height: float) -> list[_Place]:
    """Places for sizes, largest first, that fill a rectangle and are as square as can be."""
    total = sum(sizes)
    if not total:
        return []
    scale = width * height / total
    places: list[_Place] = []
    at = 0
    while at < len(sizes):
        short = min(width, height)
        row = [sizes[at] * scale]
        while at + len(row) < len(sizes):
            longer = [*row, sizes[at + len(row)] * scale]
            if _worst(longer, short) > _worst(row, short):
                break
            row = longer
        depth = sum(row) / short if short else 0.0
        along = 0.0
        for area in row:
            length = area / depth if depth else 0.0
            if width >= height:
                places.append((left, top + along, depth, length))
            else:
                places.append((left + along, top, length, depth))
            along += length
        if width >= height:
            left, width = left + depth, max(0.0, width - depth)
        else:
            top, height = top + depth, max(0.0, height - depth)
        at += len(row)
    return places


def _worst(row: Sequence[float], short: float) -> float:
    """How far the least square rectangle of a row is from a square."""
    total = sum(row)
    return max(short * short * max(row) / (total * total), total * total / (short * short * min(row)))
