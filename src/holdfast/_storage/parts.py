"""One part of a box, read and put where it belongs: straight into the memory where that can be."""

from collections.abc import Iterator

import torch

from holdfast._geometry import row_major_strides, volume
from holdfast._io.blocks import crc32
from holdfast._storage.boxes import Part, parts_of
from holdfast._storage.delivery import Delivery
from holdfast._storage.source import Chunk, Source
from holdfast._tensors.host import memory_of

__all__ = ["Reading", "parts_for"]


def parts_for(chunk: Chunk, delivery: Delivery, run_limit: int) -> Iterator[Part]:
    """The parts of the box that is wanted of a chunk, in the order of the file."""
    item = delivery.item
    return parts_of(
        chunk.shape,
        tuple(item.storage_offsets),
        tuple(item.lengths),
        chunk.dtype.itemsize,
        run_limit=run_limit,
    )


class Reading:
    """One part of a box, to be read."""

    __slots__ = ("chunk", "delivery", "part", "source")

    def __init__(self, source: Source, chunk: Chunk, delivery: Delivery, part: Part) -> None:
        self.source = source
        self.chunk = chunk
        self.delivery = delivery
        self.part = part

    def deliver(self, checksum: int | None = None) -> int:
        """Read it and put it where it belongs; go on with a running CRC-32 of all parts, if one is given."""
        part, chunk = self.part, self.chunk
        memory = self._own_memory()
        if memory is not None:
            self.source.read(part.start, memory)
            return 0 if checksum is None else crc32(memory, checksum)
        with self.source.context.budget.hold(part.nbytes):
            scratch = torch.empty(part.nbytes // chunk.dtype.itemsize, dtype=chunk.dtype)
            content = memory_of(scratch)
            self.source.read(part.start, content)
            self.delivery.put(part.offsets, scratch.as_strided(part.lengths, row_major_strides(chunk.shape)))
            return 0 if checksum is None else crc32(content, checksum)

    def _own_memory(self) -> memoryview | None:
        """The destination's bytes for this part, if they are one run on both sides."""
        part = self.part
        memory = self.delivery.memory() if part.is_run else None
        if memory is None or len(memory) == part.nbytes:
            return memory
        strides = row_major_strides(tuple(self.delivery.item.lengths))
        reach = sum((n - 1) * s for n, s in zip(part.lengths, strides, strict=True))
        if reach + 1 != volume(part.lengths):
            return None
        start = sum(o * s for o, s in zip(part.offsets, strides, strict=True)) * self.chunk.dtype.itemsize
        return memory[start : start + part.nbytes]
