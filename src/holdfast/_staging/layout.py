"""Owns where each tensor of a state lies in the arena.

Tensors whose memory is dense are copied as they lie, strides and all, so that the copy is a copy of memory.
Those that lie next to each other at home lie next to each other in the arena, with what is between them, and
are copied in one go: 20,000 small tensors become a handful of copies, and tensors that share memory share it
in the arena too. All others (with holes, expanded, on a device, conjugated only by a flag) are written out in
row-major order, each for itself.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from holdfast._staging.copying import Span

__all__ = ["Fact", "Layout", "Place", "fact_of", "lay_out", "place_in"]

Fact: TypeAlias = tuple[int, torch.dtype, torch.Size, tuple[int, ...], bool]
"""Of a tensor: address, dtype, shape, strides, and whether its elements are its memory on this host. Equal
facts are laid out equally."""

Place: TypeAlias = tuple[int, torch.dtype, Sequence[int], Sequence[int]]
"""Of a staged tensor: offset in the arena in bytes, dtype, shape, strides."""

_ALIGNMENT = 64
"""What the tensors keep of their address: as torch's own allocator has it."""

_PAGE = 4096
"""No system has smaller pages."""

_SMALL_GAP = 512
"""What lies between small tensors that were allocated one after the other: 64 to 448 bytes."""


@dataclass(frozen=True)
class Layout:
    """Where everything goes.

    Attributes:
        facts: What it was made from.
        places: Of each tensor.
        spans: Memory to be copied.
        written_out: The numbers of those that are not part of a span, and copied by their elements.
        nbytes: The size of the arena that it takes.
    """

    facts: list[Fact]
    places: list[Place]
    spans: list[Span]
    written_out: list[int]
    nbytes: int


def fact_of(tensor: torch.Tensor) -> Fact:
    """What a tensor's place depends on."""
    as_memory = tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), as_memory


def lay_out(facts: list[Fact]) -> Layout:
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
        (offsets[number], dtype, shape, _row_major(shape) if number in rows else strides)
        for number, (_, dtype, shape, strides, _) in enumerate(facts)
    ]
    return Layout(facts, places, spans, written_out, end)


def _merge(extents: list[tuple[int, int, int]], offsets: list[int]) -> tuple[list[Span], int]:
    """Join neighbours into spans, note each tensor's offset, and say where the last one ends."""
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
    """Whether what begins at ``address`` may be copied in one go with what ends at ``stop``.

    Reading what is between them is safe: each of its bytes is on a page that has a byte of one of the two,
    and so can be read. It must be little besides them.
    """
    gap = address - stop
    return gap <= max(_SMALL_GAP, nbytes // 8) and address // _PAGE - (stop - 1) // _PAGE <= 1


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements are all of the memory from the first to the last of them, each once."""
    expected = 1
    if 0 in shape:
        return True
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    lengths = [max(1, length) for length in shape[:0:-1]]
    return tuple(itertools.accumulate(lengths, int.__mul__, initial=1))[::-1] if len(shape) else ()


def place_in(base: torch.Tensor, places: Sequence[Place]) -> list[torch.Tensor]:
    """The tensors at these places of an arena, given as a tensor of bytes."""
    typed: dict[torch.dtype, torch.Tensor] = {}
    made = []
    for offset, dtype, shape, strides in places:
        of_dtype = typed.get(dtype)
        if of_dtype is None:
            of_dtype = typed[dtype] = base.view(dtype)
        made.append(of_dtype.as_strided(shape, strides, offset // dtype.itemsize))
    return made
