"""Boxes of stored tensors to their destinations: straight into the memory where that can be."""

import io
from collections.abc import Callable
from typing import Any

import torch

from holdfast._format.torch_item_reader import TensorLayout, read_item_layout
from holdfast._geometry import row_major_strides, volume
from holdfast._io.blocks import BLOCK_SIZE, crc32
from holdfast._storage.boxes import SCRATCH, Part, parts_of
from holdfast._storage.delivery import Delivery
from holdfast._storage.loaded import deliver_loaded
from holdfast._storage.record import StorageInfo
from holdfast._storage.source import Chunk, Source, filled, naming
from holdfast._storage.transformed import deliver_transformed
from holdfast._tensors.host import memory_of
from holdfast.errors import ChecksumError
from holdfast.planner import ReadItem

__all__ = ["tensor_jobs"]

# One thread reads a large payload in pieces of this, so that several share a single large tensor.
_PIECE = 32 * 1024 * 1024


def tensor_jobs(source: Source, chunk: Chunk, item: ReadItem) -> list[Callable[[], None]]:
    """Jobs that together read one box of a stored chunk."""
    delivery = Delivery(source.context.counter, item, chunk.dtype)
    if source.place.transform_descriptors:
        return [_job(delivery, lambda: deliver_transformed(source, chunk, delivery))]
    if not source.place.is_checked:
        return [_job(delivery, lambda: _deliver_torch_written(source, chunk, delivery))]
    parts = list(_parts(chunk, delivery, _PIECE))
    if not parts:
        return [_job(delivery, delivery.target)]
    delivery.waiting = len(parts)
    return [_job(delivery, _Reading(source, chunk, delivery, part)) for part in parts]


def _parts(chunk: Chunk, delivery: Delivery, run_limit: int) -> Any:
    item = delivery.item
    return parts_of(
        chunk.shape,
        tuple(item.storage_offsets),
        tuple(item.lengths),
        chunk.dtype.itemsize,
        run_limit=run_limit,
    )


def _job(delivery: Delivery, work: Callable[[], Any]) -> Callable[[], None]:
    def job() -> None:
        with naming(delivery.key):
            work()
            delivery.arrived()

    return job


class _Reading:
    """One part of a box, to be read."""

    __slots__ = ("chunk", "delivery", "part", "source")

    def __init__(self, source: Source, chunk: Chunk, delivery: Delivery, part: Part) -> None:
        self.source = source
        self.chunk = chunk
        self.delivery = delivery
        self.part = part

    def __call__(self) -> None:
        part, chunk = self.part, self.chunk
        memory = self._own_memory()
        if memory is not None:
            self.source.read(part.start, memory)
            return
        with self.source.context.budget.hold(part.nbytes):
            scratch = torch.empty(part.nbytes // chunk.dtype.itemsize, dtype=chunk.dtype)
            self.source.read(part.start, memory_of(scratch))
            self.delivery.put(part.offsets, scratch.as_strided(part.lengths, row_major_strides(chunk.shape)))

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


def _deliver_torch_written(source: Source, chunk: Chunk, delivery: Delivery) -> None:
    """An item that torch wrote: its elements lie somewhere in the container."""
    place = source.place
    layout = read_item_layout(source.read_at, place.length, path=source.file.path, key=delivery.key)
    if layout is None or not _is_row_major(layout, chunk):
        whole = filled(place.length, lambda view: source.file.reader().read_into(place.offset, view))
        deliver_loaded(io.BytesIO(whole), chunk, delivery)
        return
    start = layout.payload_offset + layout.storage_offset * chunk.dtype.itemsize
    memory = delivery.memory()
    if (
        memory is not None
        and tuple(delivery.item.lengths) == chunk.shape
        and len(memory) == layout.payload_nbytes
    ):
        _read_whole(source, place.offset + start, memory, layout.crc32)
        return
    # Part of a payload cannot be checked: torch keeps one checksum for the whole.
    inner = Source(
        source.context,
        source.file,
        StorageInfo(place.relative_path, place.offset, place.length, None, start),
    )
    for part in _parts(chunk, delivery, SCRATCH):
        source.context.cancellation.check()
        _Reading(inner, chunk, delivery, part)()


def _is_row_major(layout: TensorLayout, chunk: Chunk) -> bool:
    return (
        layout.shape == chunk.shape
        and layout.dtype == str(chunk.dtype)[6:]
        and (layout.strides == row_major_strides(chunk.shape) or volume(chunk.shape) == 0)
        and layout.byteorder == "little"
        and not (layout.conj or layout.neg)
    )


def _read_whole(source: Source, offset: int, memory: memoryview, expected: int | None) -> None:
    found = 0
    for at in range(0, len(memory), BLOCK_SIZE):
        piece = memory[at : at + BLOCK_SIZE]
        source.file.reader().read_into(offset + at, piece)
        found = crc32(piece, found)
    if source.context.verify and expected is not None and found != expected:
        raise ChecksumError(
            f"{source.file.path}: the tensor's bytes at {offset} are not the ones that were written",
            path=source.file.path,
            expected=expected,
            found=found,
        )
