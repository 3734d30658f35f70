"""Owns the bytes of a strided tensor in row-major order, by ranges, however they lie in a file."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from holdfast._byte_ranges import SCRATCH, ranges_of
from holdfast._geometry import Box, is_row_major, volume
from holdfast._tensors.dtensors import narrowed
from holdfast._tensors.host import memory_of


class StridedTensor(NamedTuple):
    """Where the elements of a tensor lie in a file.

    Attributes:
        start: The byte of the file with the first element.
        dtype: The dtype.
        shape: Elements in each dimension.
        strides: Elements between neighbours, in the file.
        conj: The elements stand for their complex conjugates.
        neg: The elements stand for their negatives.
    """

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conj: bool = False
    neg: bool = False

    @property
    def nbytes(self) -> int:
        """How many bytes its elements take in row-major order."""
        return volume(self.shape) * self.dtype.itemsize

    @property
    def is_row_major(self) -> bool:
        """Whether the bytes of the file are its elements in row-major order."""
        return not (self.conj or self.neg) and is_row_major(self.shape, self.strides)

    def read_into(self, read: Callable[[int, memoryview], None], offset: int, view: memoryview) -> None:
        """Fill ``view`` with its bytes in row-major order, from byte ``offset`` of them on.

        Args:
            read: Fills a buffer with the bytes of the file from an offset on.
            offset: The first byte.
            view: Where they go.
        """
        size = self.dtype.itemsize
        first, end = offset // size, -(-(offset + len(view)) // size)
        elements = torch.empty(end - first, dtype=self.dtype, device="cpu")
        position = 0
        for box in _boxes_of_run(self.shape, first, end - first):
            count = volume(box.lengths)
            self._read_box(read, box, elements[position : position + count].view(box.lengths))
            position += count
        if self.conj:
            elements = elements.conj_physical_()
        if self.neg:
            elements = elements.neg_()
        view[:] = memory_of(elements)[offset - first * size : offset - first * size + len(view)]

    def _read_box(self, read: Callable[[int, memoryview], None], box: Box, target: torch.Tensor) -> None:
        for piece in ranges_of(self.strides, *box, self.dtype.itemsize, run_limit=SCRATCH, block=0):
            scratch = torch.empty(piece.nbytes // self.dtype.itemsize, dtype=self.dtype, device="cpu")
            read(self.start + piece.start, memory_of(scratch))
            part = narrowed(target, piece.offsets, piece.lengths)
            part.copy_(scratch.as_strided(piece.lengths, self.strides))


def _boxes_of_run(shape: tuple[int, ...], first: int, count: int) -> Iterator[Box]:
    """The boxes that ``count`` elements from ``first`` on, in row-major order, are made of."""
    if not shape:
        if count:
            yield Box((), ())
        return
    row_nelem = volume(shape[1:])
    while count:
        row, inside = divmod(first, row_nelem)
        if inside or count < row_nelem:
            taken = min(count, row_nelem - inside)
            for box in _boxes_of_run(shape[1:], inside, taken):
                yield Box((row, *box.offsets), (1, *box.lengths))
        else:
            rows = count // row_nelem
            taken = rows * row_nelem
            yield Box((row, *[0] * (len(shape) - 1)), (rows, *shape[1:]))
        first, count = first + taken, count - taken
