"""Owns the picture of what takes how much: a rectangle for each module, as large as its bytes."""

from collections.abc import Sequence
from typing import NamedTuple

from holdfast._human_units import size_text
from holdfast.cli.pages.page import legend
from holdfast.cli.pages.svg import box, drawing, nested, text
from holdfast.cli.text import counted
from holdfast.cli.tree import Node

__all__ = ["treemap"]

_HEIGHT = 440.0
_WIDTH = 1040.0
"""The width for which rectangles are made as square as can be; the picture is as wide as its place."""

_SMALLEST = 1500.0
"""How many square pixels the parts of a module must have on average to be drawn one by one."""

_MOST_PARTS = 400
"""How many parts of one module are drawn."""

_HEAD = 17.0
"""The height of the line with the name of a module."""

_COLOURS = 8
_LETTER = 7.0  # pixels, about
_PHONE = 0.33  # of the width that is drawn for


class _Area(NamedTuple):
    """A rectangle, in pixels of the width that is drawn for."""

    left: float
    top: float
    width: float
    height: float

    @property
    def area(self) -> float:
        return self.width * self.height


def treemap(root: Node) -> str:
    """The tree as a drawing: modules in their modules, down to rectangles that can be told apart."""
    prefix, root = _steps_down(root)
    groups = _parts(root) or [root]
    shapes = []
    places = _squarified([group.nbytes for group in groups], 0.0, 0.0, _WIDTH, _HEIGHT)
    for number, (group, place) in enumerate(zip(groups, places, strict=True)):
        # All small groups have the last colour.
        colour = f"c{min(number, _COLOURS - 1)}"
        shapes += _draw(group, prefix, prefix, place, colour)
    names = [f"{prefix}{group.label} {size_text(group.nbytes)}" for group in groups]
    entries = [(name, f"c{number}") for number, name in enumerate(names[: _COLOURS - 1])]
    if len(names) >= _COLOURS:
        entries.append(("all others", f"c{_COLOURS - 1}"))
    label = f"bytes by module: {', '.join(name for name, _ in entries)}"
    return legend(entries) + drawing("".join(shapes), _HEIGHT, label=label)


def _steps_down(node: Node, *, nearly_all: float = 1.0) -> tuple[str, Node]:
    """The first node at or below one that has several parts, and the steps to it, with a dot behind each.

    Args:
        node: Where to begin.
        nearly_all: A part with this share of the bytes is taken for the only one.
    """
    prefix = ""
    while node.children:
        largest = max(node.children.values(), key=lambda child: child.nbytes)
        alone = len(node.children) == 1 or largest.nbytes >= nearly_all * node.nbytes > 0
        if not alone or not largest.children:
            break
        node = largest
        prefix = f"{prefix}{node.label}."
    return prefix, node


def _parts(node: Node) -> list[Node]:
    """The children of a node that take space, the largest first; of too many, the smallest are joined."""
    parts = sorted((below for below in node.children.values() if below.nbytes), key=lambda n: -n.nbytes)
    if len(parts) <= _MOST_PARTS:
        return parts
    others = Node(f"and {len(parts) - _MOST_PARTS:,} more")
    others.nbytes = sum(part.nbytes for part in parts[_MOST_PARTS:])
    others.count = sum(part.count for part in parts[_MOST_PARTS:])
    return [*parts[:_MOST_PARTS], others]


def _draw(node: Node, above: str, headed: str, place: _Area, colour: str) -> list[str]:
    """A node as a rectangle, or as its parts under a line with its name if there is room.

    Args:
        node: The node.
        above: The names above it, each with a dot behind.
        headed: Those of them that stand in the lines above the place.
        place: Where it is drawn.
        colour: Its class.
    """
    steps, last = _steps_down(node, nearly_all=0.99)
    name = f"{above}{node.label}"
    parts = _parts(last)
    if len(parts) < 2 or place.area < _SMALLEST * len(parts):
        return [_rectangle(node, name, name.removeprefix(headed), place, colour)]
    name = f"{name}.{steps}"
    title = name.removeprefix(headed).rstrip(".")
    shapes = []
    room = place
    if place.height > 3 * _HEAD and _LETTER * len(title) + 10 < place.width:
        room = _Area(place.left, place.top + _HEAD, place.width, place.height - _HEAD)
        headed = name
        shapes.append(_head(last, name, title, place, colour))
    for part, at in zip(parts, _squarified([part.nbytes for part in parts], *room), strict=True):
        shapes += _draw(part, name, headed, at, colour)
    return shapes


def _head(node: Node, name: str, title: str, place: _Area, colour: str) -> str:
    shape = box(0, 0, 1, _HEAD, kind=f"head {colour}")
    line = text(title, "5", 13, kind=f"title {_phone(title, place)}".strip())
    return _nested(shape + line, place._replace(height=_HEAD), _hint(node, name.rstrip(".")))


def _rectangle(node: Node, name: str, short: str, place: _Area, colour: str) -> str:
    shape = box(0, 0, 1, place.height, kind=f"tile {colour}")
    short, size = _fitting(short, place.width), size_text(node.nbytes)
    lines = []
    if short and place.height > 18:
        lines.append(text(short, "5", 15, kind=_phone(short, place) or None))
        if place.height > 36 and _LETTER * len(size) + 8 < place.width:
            lines.append(text(size, "5", 30, kind=f"dim {_phone(size, place)}".strip()))
    return _nested(shape + "".join(lines), place, _hint(node, name))


def _nested(content: str, place: _Area, hint: str) -> str:
    left, top, width, height = place
    return nested(content, left / _WIDTH, top, width / _WIDTH, height, hint=hint)


def _hint(node: Node, name: str) -> str:
    return f"{name}\n{size_text(node.nbytes)}, {counted(node.count, 'value')}"


def _phone(words: str, place: _Area) -> str:
    """The class of a text that has no room on a phone; empty if it has."""
    return "" if _LETTER * len(words) + 8 < _PHONE * place.width else "wide"


def _fitting(name: str, width: float) -> str:
    """As many of the last steps of a name as fit; none if not even the last one does."""
    steps = name.split(".")
    for first in range(len(steps)):
        short = ".".join(steps[first:])
        if _LETTER * len(short) + 8 < width:
            return short
    return ""


def _squarified(sizes: Sequence[int], left: float, top: float, width: float, height: float) -> list[_Area]:
    """Places for sizes, largest first, that fill a rectangle and are as square as can be."""
    total = sum(sizes)
    if not total:
        return []
    scale = width * height / total
    places: list[_Area] = []
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
                places.append(_Area(left, top + along, depth, length))
            else:
                places.append(_Area(left + along, top, length, depth))
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
