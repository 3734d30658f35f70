"""Owns the box itself: its size, its strides, and where two boxes meet."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A box of an array: where it begins and how long it is, in each dimension."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


def volume(lengths: Sequence[int]) -> int:
    """The number of elements in a box; 1 for a box without dimensions."""
    return prod(lengths)


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements between neighbours along each dimension.

    An empty dimension counts as one element, as torch counts it, so that strides are never 0.
    """
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= length or 1
    strides.reverse()
    return tuple(strides)


def contains(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether the box has the shape's number of dimensions and lies in it, with no negative number."""
    if not len(shape) == len(offsets) == len(lengths):
        return False
    for size, offset, length in zip(shape, offsets, lengths, strict=True):
        if offset < 0 or length < 0 or offset + length > size:
            return False
    return True


def intersect(a: Box, b: Box) -> Box | None:
    """The elements that are in both boxes, or None if there are none.

    Both boxes have the same number of dimensions. Two boxes without dimensions meet in their one element.
    """
    starts = tuple(map(max, a.offsets, b.offsets))
    lengths = tuple(
        min(a_start + a_length, b_start + b_length) - start
        for a_start, a_length, b_start, b_length, start in zip(*a, *b, starts, strict=True)
    )
    return Box(starts, lengths) if all(length > 0 for length in lengths) else None
