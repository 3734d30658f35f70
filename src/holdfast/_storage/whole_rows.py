"""Owns which rows are read whole, so that ranks which need different columns of them read them once."""

from collections.abc import Sequence
from typing import NamedTuple

from holdfast._geometry import row_major_strides


class WholeRows(NamedTuple):
    """All rows of a stored chunk that a box has a part of.

    Attributes:
        columns: The first dimension of a row: from there on, all of the chunk belongs to a row.
        offsets: Where the first row begins in the chunk.
        lengths: How long the rows are together in each dimension.
    """

    columns: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


def whole_rows(
    shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], itemsize: int, block_size: int
) -> WholeRows | None:
    """The whole rows around a box of columns; None if it has whole rows already.

    A row is at most as long as a block, so that whoever checks what it reads must read all of it anyway.

    Args:
        shape: The shape of the stored chunk.
        offsets: Where the box begins in the chunk.
        lengths: The box's lengths.
        itemsize: Bytes an element.
        block_size: The unit in which the chunk is checked.
    """
    if 0 in lengths or block_size % itemsize:
        return None
    strides = row_major_strides(tuple(shape))
    columns = len(shape)
    while columns > 1 and strides[columns - 2] * itemsize <= block_size:
        columns -= 1
    if tuple(lengths[columns:]) == tuple(shape[columns:]):
        return None
    return WholeRows(
        columns,
        (*offsets[:columns], *(0 for _ in shape[columns:])),
        (*lengths[:columns], *shape[columns:]),
    )
