"""Tensors that torch wrote: their elements lie somewhere in the container, in an order of their own."""

import io
from dataclasses import replace

import torch

from holdfast._format.torch_item_reader import TensorLayout, read_item_layout
from holdfast._geometry import row_major_strides, volume
from holdfast._io.blocks import BLOCK_SIZE, crc32
from holdfast._storage.boxes import SCRATCH
from holdfast._storage.delivery import Delivery
from holdfast._storage.loaded import deliver_loaded
from holdfast._storage.parts import Reading, parts_for
from holdfast._storage.record import StorageInfo
from holdfast._storage.source import Chunk, Source, filled
from holdfast.errors import ChecksumError
from holdfast.planner import ReadItem

__all__ = ["deliver_torch_written"]


def deliver_torch_written(source: Source, chunk: Chunk, delivery: Delivery) -> None:
    """Read the box of an item that torch wrote; only its bytes, where the elements lie one by one."""
    place = source.place
    layout = read_item_layout(source.read_at, place.length, path=source.file.path, key=delivery.key)
    order = None if layout is None else _order_in_memory(layout, chunk)
    if layout is None or order is None:
        whole = filled(place.length, lambda view: source.file.reader().read_into(place.offset, view))
        deliver_loaded(io.BytesIO(whole), chunk, delivery)
        return
    start = layout.payload_offset + layout.storage_offset * chunk.dtype.itemsize
    if order != sorted(order):
        # A transposed or channels-last tensor is a row-major one with its dimensions in another order.
        chunk = chunk._replace(shape=tuple(chunk.shape[d] for d in order))
        delivery = _Reordered(delivery, order)
    # Also where there is nothing to read: it counts as delivered.
    delivery.target()
    is_whole = tuple(delivery.item.lengths) == chunk.shape and chunk.nbytes == layout.payload_nbytes
    memory = delivery.memory() if is_whole else None
    if memory is not None:
        _read_whole(source, place.offset + start, memory, layout.crc32)
        return
    # Part of a payload cannot be checked: torch keeps one checksum for the whole.
    inner = Source(
        source.context,
        source.file,
        StorageInfo(place.relative_path, place.offset, place.length, None, start),
    )
    found = 0
    for part in parts_for(chunk, delivery, SCRATCH):
        source.context.cancellation.check()
        found = Reading(inner, chunk, delivery, part).deliver(found if is_whole else None)
    if is_whole:
        _compare(source, place.offset + start, layout.crc32, found)


def _order_in_memory(layout: TensorLayout, chunk: Chunk) -> list[int] | None:
    """The dimensions from the outermost to the innermost in memory; None if elements have gaps or doubles."""
    if (
        layout.shape != chunk.shape
        or layout.dtype != str(chunk.dtype)[6:]
        or layout.byteorder != "little"
        or layout.conj
        or layout.neg
    ):
        return None
    plain = list(range(len(chunk.shape)))
    if volume(chunk.shape) == 0 or layout.strides == row_major_strides(chunk.shape):
        return plain
    # A dimension of one element may have any stride; where it stands makes no difference.
    order = sorted(plain, key=lambda d: (-layout.strides[d] if chunk.shape[d] > 1 else 0, d))
    expected = row_major_strides([chunk.shape[d] for d in order])
    dense = all(
        layout.strides[d] == step or chunk.shape[d] == 1 for d, step in zip(order, expected, strict=True)
    )
    return order if dense else None


class _Reordered(Delivery):
    """A delivery that is seen with its dimensions in another order."""

    def __init__(self, inner: Delivery, order: list[int]) -> None:
        item = inner.item

        def reordered(sizes: torch.Size) -> torch.Size:
            return torch.Size([sizes[d] for d in order])

        seen: ReadItem = replace(
            item,
            storage_offsets=reordered(item.storage_offsets),
            dest_offsets=reordered(item.dest_offsets),
            lengths=reordered(item.lengths),
        )
        super().__init__(inner.counter, seen, inner.dtype)
        self.inner = inner
        self.order = order

    def target(self) -> torch.Tensor:
        """Where it goes, in that order."""
        return self.inner.target().permute(self.order)


def _read_whole(source: Source, offset: int, memory: memoryview, expected: int | None) -> None:
    found = 0
    for at in range(0, len(memory), BLOCK_SIZE):
        piece = memory[at : at + BLOCK_SIZE]
        source.file.reader().read_into(offset + at, piece)
        found = crc32(piece, found)
    _compare(source, offset, expected, found)


def _compare(source: Source, offset: int, expected: int | None, found: int) -> None:
    if source.context.verify and expected is not None and found != expected:
        raise ChecksumError(
            f"{source.file.path}: the tensor's bytes at {offset} are not the ones that were written",
            path=source.file.path,
            expected=expected,
            found=found,
        )
