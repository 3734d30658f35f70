"""Owns what is read whole by ranks that need different parts of it, so that one of them reads for all."""

import math
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


_LEAST_PART = 4
_WORTHWHILE = 2


def is_read_whole(shape: Sequence[int], lengths: Sequence[int], itemsize: int, request_nbytes: int) -> bool:
    """Whether a chunk is read by one request for all ranks that need parts of it.

    That spares requests for less than half of what a request should ask for. Each rank gets all of the chunk,
    so this is done only if its part is a quarter or more.

    Args:
        shape: The shape of the stored chunk.
        lengths: How much of it this rank needs.
        itemsize: Bytes an element.
        request_nbytes: How many bytes a request should ask for; 0 if that does not matter.
    """
    nbytes, needed = math.prod(shape) * itemsize, math.prod(lengths) * itemsize
    is_part = 0 < needed < nbytes <= request_nbytes
    return is_part and needed * _WORTHWHILE < request_nbytes and needed * _LEAST_PART >= nbytes
