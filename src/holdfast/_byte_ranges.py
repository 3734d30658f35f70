"""Owns which byte ranges of a stored chunk a box of it needs."""

from collections.abc import Iterator
from typing import NamedTuple

from holdfast._geometry import is_row_major, outermost, reach_of, volume

SCRATCH = 32 * 1024 * 1024
"""How much of a payload goes through memory of our own at once, where it cannot go straight to its place."""

# A block that two pieces share is read twice to be checked.
_BLOCK = 1 << 20


class Thrift(NamedTuple):
    """How much may be read that is not wanted, to save requests: what lies between the rows of a box.

    Attributes:
        waste: Bytes that are read for each one that is wanted.
        always_fine: So many bytes are read at once in any case.
    """

    waste: float
    always_fine: int


USUAL = Thrift(waste=4, always_fine=1 << 20)
"""Right where a request costs about as much as reading a MiB."""


def _at_block_boundary(start: int, rows: int, row_nbytes: int, most: int) -> int:
    """About ``rows`` rows, so that what follows them begins with a block, if rows allow that."""
    boundary = (start + rows * row_nbytes) // _BLOCK * _BLOCK
    cut = -(-(boundary - start) // row_nbytes)
    return cut if 0 < cut < most else rows


class ByteRange(NamedTuple):
    """A piece of a box, and the bytes that are read at once for it.

    Attributes:
        offsets: Where the piece begins in the box.
        lengths: How long it is in each dimension.
        start: The first byte of the payload that it needs.
        nbytes: How many bytes from there on hold it, with what lies between its rows.
        is_run: Whether nothing lies between: the bytes are the piece, in row-major order.
        skipped: How many elements before the piece are read, too, because other ranks need them; None if it
            is read for this rank alone.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int
    nbytes: int
    is_run: bool
    skipped: int | None = None


def ranges_of(
    strides: tuple[int, ...],
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
    itemsize: int,
    *,
    run_limit: int,
    block: int,
    only_runs: bool = False,
    thrift: Thrift = USUAL,
) -> Iterator[ByteRange]:
    """Cut a box of a stored chunk into pieces to be read, in the order of the file.

    Args:
        strides: Elements between neighbours along each dimension of the chunk.
        offsets: Where the box begins in the chunk.
        lengths: The box's lengths; an empty box has no ranges.
        itemsize: Bytes an element.
        run_limit: The most bytes of a piece that is one run.
        block: The unit in which bytes are checked, and so read, whatever is wanted of them; 0 if they are
            not.
        only_runs: Whether no piece may have anything between its rows.
        thrift: What may be read besides.
    """
    if 0 in lengths:
        return
    todo = [((0,) * len(lengths), lengths)]
    while todo:
        at, size = todo.pop()
        first = sum((o + a) * s for o, a, s in zip(offsets, at, strides, strict=True))
        reach = reach_of(size, strides)
        span, is_run = reach * itemsize, reach == volume(size) and is_row_major(size, strides)
        if is_run and span <= run_limit:
            yield ByteRange(at, size, first * itemsize, span, is_run=True)
            continue
        dimension = outermost(size, strides)
        # If there is no whole block between two rows, all that lies between them is read to be checked.
        is_read = dimension is not None and strides[dimension] * itemsize <= block
        most = SCRATCH if is_read else max(int(thrift.waste * volume(size) * itemsize), thrift.always_fine)
        if not is_run and not only_runs and span <= min(SCRATCH, most):
            yield ByteRange(at, size, first * itemsize, span, is_run=False)
            continue
        if dimension is None:
            # One element, or a run of one dimension: there is nothing left to cut.
            yield ByteRange(at, size, first * itemsize, span, is_run)
            continue
        half = size[dimension] // 2
        if is_run or is_read:
            half = _at_block_boundary(first * itemsize, half, strides[dimension] * itemsize, size[dimension])
        second = (*at[:dimension], at[dimension] + half, *at[dimension + 1 :])
        # The later half first onto the stack, so that ranges come in the order of the file.
        todo.append((second, (*size[:dimension], size[dimension] - half, *size[dimension + 1 :])))
        todo.append((at, (*size[:dimension], half, *size[dimension + 1 :])))
