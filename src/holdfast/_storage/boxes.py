"""Boxes of stored chunks as reads: which byte ranges of a payload to read, and where they go."""

from collections.abc import Iterator
from typing import NamedTuple

from holdfast._geometry import row_major_strides, volume

__all__ = ["SCRATCH", "Part", "parts_of"]

SCRATCH = 32 * 1024 * 1024
"""How much of a payload goes through memory of our own at once, where it cannot go straight to its place."""

# Reading what lies between the rows of a box is cheaper than a request for each row, up to a point.
_WASTE = 4
_ALWAYS_FINE = 1024 * 1024


# A block that two pieces share is read twice to be checked.
_BLOCK = 1 << 20


def _at_block_boundary(start: int, rows: int, row_nbytes: int, most: int) -> int:
    """About ``rows`` rows, so that what follows them begins with a block, if rows allow that."""
    boundary = (start + rows * row_nbytes) // _BLOCK * _BLOCK
    cut = -(-(boundary - start) // row_nbytes)
    return cut if 0 < cut < most else rows


class Part(NamedTuple):
    """A piece of a box that is read at once.

    Attributes:
        offsets: Where the piece begins in the box.
        lengths: How long it is in each dimension.
        start: The first byte of the payload that it needs.
        nbytes: How many bytes from there on hold it, with what lies between its rows.
        is_run: Whether nothing lies between: the bytes are the piece.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int
    nbytes: int
    is_run: bool


def parts_of(
    chunk_shape: tuple[int, ...],
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
    itemsize: int,
    *,
    run_limit: int | None,
) -> Iterator[Part]:
    """Cut a box of a row-major chunk into pieces to be read.

    Args:
        chunk_shape: The shape of the stored chunk.
        offsets: Where the box begins in the chunk.
        lengths: The box's lengths; an empty box has no parts.
        itemsize: Bytes an element.
        run_limit: The most bytes of a piece that is one run; None if such a piece needs no scratch memory.
    """
    if 0 in lengths:
        return
    strides = row_major_strides(chunk_shape)
    todo = [((0,) * len(lengths), lengths)]
    while todo:
        at, size = todo.pop()
        first = sum((o + a) * s for o, a, s in zip(offsets, at, strides, strict=True))
        last = first + sum((n - 1) * s for n, s in zip(size, strides, strict=True))
        span = (last + 1 - first) * itemsize
        is_run = (last + 1 - first) == volume(size)
        if is_run and (run_limit is None or span <= run_limit):
            yield Part(at, size, first * itemsize, span, is_run=True)
            continue
        needed = volume(size) * itemsize
        if not is_run and span <= SCRATCH and span <= max(_WASTE * needed, _ALWAYS_FINE):
            yield Part(at, size, first * itemsize, span, is_run=False)
            continue
        dimension = next((d for d, n in enumerate(size) if n > 1), None)
        if dimension is None:
            # One element, or a run of one dimension: there is nothing left to cut.
            yield Part(at, size, first * itemsize, span, is_run)
            continue
        half = size[dimension] // 2
        if is_run:
            half = _at_block_boundary(first * itemsize, half, strides[dimension] * itemsize, size[dimension])
        second = (*at[:dimension], at[dimension] + half, *at[dimension + 1 :])
        # The later half first onto the stack, so that parts come in the order of the file.
        todo.append((second, (*size[:dimension], size[dimension] - half, *size[dimension + 1 :])))
        todo.append((at, (*size[:dimension], half, *size[dimension + 1 :])))
