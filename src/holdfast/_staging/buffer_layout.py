"""Decides where each tensor of a state goes in the staging buffer.

A tensor whose memory is dense keeps its strides, so that one copy of memory copies it. Tensors that are
neighbours in memory stay neighbours in the buffer and are copied together, gaps included: 20,000 small
tensors become a handful of copies, and tensors that share memory share it in the buffer too. All other
tensors (with holes, expanded, on a device, conjugated only by a flag) are copied one by one, in row-major
order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from holdfast._geometry import row_major_strides
from holdfast._staging.staging_copy import Span

Fact: TypeAlias = tuple[int, torch.dtype, torch.Size, tuple[int, ...], bool]
"""Of a tensor: address, dtype, shape, strides, and whether its memory on the host holds its values as they
are. Equal facts give equal layouts."""

Place: TypeAlias = tuple[int, torch.dtype, Sequence[int], Sequence[int]]
"""Of a staged tensor: offset in the buffer in bytes, dtype, shape, strides."""

_ALIGNMENT = 64
"""Addresses keep their remainder by this number, which is the alignment of torch's allocator."""

_PAGE = 4096
"""No system has smaller pages."""

_SMALL_GAP = 512
"""More than the gap between small tensors that were allocated one after the other: 64 to 448 bytes."""


@dataclass(frozen=True)
class BufferLayout:
    """Where each tensor of a state goes.

    Attributes:
        facts: Of each tensor, what the layout was made from.
        places: Of each tensor, its place in the buffer.
        spans: The copies of memory to make.
        written_out: The numbers of the tensors that no span covers; they are copied element by element.
        nbytes: The size of the buffer that is needed.
    """

    facts: list[Fact]
    places: list[Place]
    spans: list[Span]
    written_out: list[int]
    nbytes: int


def fact_of(tensor: torch.Tensor) -> Fact:
    """Everything that the layout depends on, of one tensor."""
    as_memory = tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), as_memory


def lay_out(facts: list[Fact]) -> BufferLayout:
    """Give every tensor its place."""
    extents: list[tuple[int, int, int]] = []
    written_out: list[int] = []
    for number, (address, dtype, shape, strides, as_memory) in enumerate(facts):
        if as_memory and address % dtype.itemsize == 0 and _is_dense(shape, strides):
            if nbytes := shape.numel() * dtype.itemsize:
                extents.append((address, nbytes, number))
        else:
            written_out.append(number)
    offsets = [0] * len(facts)
    spans, end = _merge(extents, offsets)
    for number in written_out:
        offsets[number] = end
        end = _aligned(end + facts[number][2].numel() * facts[number][1].itemsize)
    rows = set(written_out)
    places: list[Place] = [
        (offsets[number], dtype, shape, row_major_strides(shape) if number in rows else strides)
        for number, (_, dtype, shape, strides, _) in enumerate(facts)
    ]
    return BufferLayout(facts, places, spans, written_out, end)


def _merge(extents: list[tuple[int, int, int]], offsets: list[int]) -> tuple[list[Span], int]:
    """Join neighbours into spans and set each tensor's offset; returns the spans and the end of the last."""
    spans: list[Span] = []
    start = stop = cursor = offset = 0
    for address, nbytes, number in sorted(extents):
        if stop == 0 or not _are_neighbours(stop, address, nbytes):
            if stop:
                spans.append((start, offset, stop - start))
                cursor = _aligned(offset + stop - start)
            start, stop = address, address + nbytes
            offset = cursor + address % _ALIGNMENT
        else:
            stop = max(stop, address + nbytes)
        offsets[number] = offset + address - start
    if stop:
        spans.append((start, offset, stop - start))
        cursor = _aligned(offset + stop - start)
    return spans, cursor


def _are_neighbours(stop: int, address: int, nbytes: int) -> bool:
    """Whether the tensor at ``address`` may be copied together with the memory that ends at ``stop``.

    The gap between them must be small, and safe to read: each byte of it is on the same page as a byte of one
    of the two.
    """
    gap = address - stop
    return gap <= max(_SMALL_GAP, nbytes // 8) and address // _PAGE - (stop - 1) // _PAGE <= 1


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill the memory from the first to the last of them, without gap or overlap."""
    expected = 1
    if 0 in shape:
        return True
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True


def place_in(base: torch.Tensor, places: Sequence[Place]) -> list[torch.Tensor]:
    """The tensors at these places of a buffer, which is given as a tensor of bytes."""
    typed: dict[torch.dtype, torch.Tensor] = {}
    made = []
    for offset, dtype, shape, strides in places:
        of_dtype = typed.get(dtype)
        if of_dtype is None:
            of_dtype = typed[dtype] = base.view(dtype)
        made.append(of_dtype.as_strided(shape, strides, offset // dtype.itemsize))
    return made
