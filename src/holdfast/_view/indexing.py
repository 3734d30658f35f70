"""Owns what an index of a tensor means: which box must be read, and what is taken of it in memory."""

import operator
from typing import Any, NamedTuple

from holdfast._contents.inventory import Ints
from holdfast._geometry import Box
from holdfast.errors import UsageError


class IndexedBox(NamedTuple):
    """The elements that an index selects.

    Attributes:
        box: The smallest box that has it all.
        steps: How far apart the wanted elements of the box lie, in each dimension.
        dropped: The dimensions that integers took away.
    """

    box: Box
    steps: Ints
    dropped: frozenset[int]

    @property
    def shape(self) -> Ints:
        """The shape of what is selected, before dimensions are dropped."""
        return tuple(-(-length // step) for length, step in zip(self.box.lengths, self.steps, strict=True))

    @property
    def inside(self) -> tuple[Any, ...]:
        """The index that gives the result, of what was read with every step taken."""
        return tuple(0 if number in self.dropped else slice(None) for number in range(len(self.steps)))


def select(shape: Ints, index: Any) -> IndexedBox:
    """Resolve an index of a tensor of a shape: integers, slices with positive steps, and an Ellipsis.

    Raises:
        IndexError: An integer is out of range, or there are too many.
        UsageError: It is another kind of index, or a slice with a step that is not positive.
    """
    words = list(index) if isinstance(index, tuple) else [index]
    gaps = [number for number, word in enumerate(words) if word is Ellipsis]
    if len(gaps) > 1:
        raise IndexError("an index can have one '...' only")
    for word in words:
        if not isinstance(word, slice) and word is not Ellipsis:
            _check_kind(word)
    missing = len(shape) - (len(words) - len(gaps))
    if missing < 0:
        raise IndexError(f"too many indices: the tensor has {len(shape)} dimensions, not {len(words)}")
    at = gaps[0] if gaps else len(words)
    words[at : at + len(gaps)] = [slice(None)] * missing
    offsets, lengths, steps, dropped = [], [], [], set()
    for number, (word, length) in enumerate(zip(words, shape, strict=True)):
        if isinstance(word, slice):
            begin, count, step = _resolve_slice(word, length)
        else:
            begin, count, step = _resolve_number(word, length, number), 1, 1
            dropped.add(number)
        offsets.append(begin)
        lengths.append(count)
        steps.append(step)
    return IndexedBox(Box(tuple(offsets), tuple(lengths)), tuple(steps), frozenset(dropped))


def _resolve_slice(word: slice, length: int) -> tuple[int, int, int]:
    if word.step is not None and operator.index(word.step) < 1:
        raise UsageError(
            f"a slice of a stored tensor must have a positive step, not {word.step}", found=word.step
        )
    begin, end, step = word.indices(length)
    count = len(range(begin, end, step))
    # Up to the last element that is wanted, not up to the end.
    return begin, (count - 1) * step + 1 if count else 0, step


def _check_kind(word: Any) -> None:
    if isinstance(word, bool) or not hasattr(word, "__index__") or getattr(word, "shape", ()) != ():
        raise UsageError(
            f"a stored tensor is indexed with integers, slices and '...', not with {type(word).__name__}: "
            "read a slice first, and index that",
            found=type(word).__name__,
        )


def _resolve_number(word: Any, length: int, dimension: int) -> int:
    number = operator.index(word)
    if not -length <= number < length:
        raise IndexError(f"index {number} is out of range for dimension {dimension} with {length} elements")
    return number % length
