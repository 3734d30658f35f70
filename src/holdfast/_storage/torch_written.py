"""Owns the reading of tensors that torch wrote: their elements lie somewhere in the container, in any order.

What cannot be read by ranges, torch reads: unusual strides, lazy conjugates, other byte orders.
"""

import io
from dataclasses import replace

import torch

from holdfast._byte_ranges import SCRATCH
from holdfast._format.item_table import StorageInfo
from holdfast._format.torch_item_reader import TensorLayout, read_item_layout
from holdfast._geometry import row_major_strides, volume
from holdfast._io.blocks import BLOCK_SIZE
from holdfast._objects.torch_archive import refuse_compressed
from holdfast._storage.destinations import Destination
from holdfast._storage.item_reader import Chunk, ItemReader
from holdfast._storage.ranges import RangeRead, ranges_for
from holdfast.errors import ChecksumError
from holdfast.planner import ReadItem


def deliver_torch_written(reader: ItemReader, chunk: Chunk, destination: Destination) -> None:
    """Read the box of an item that torch wrote; only its bytes, where the elements lie one by one."""
    info = reader.info
    layout = read_item_layout(reader.read_at, info.length, path=reader.file.path, key=destination.key)
    order = None if layout is None else _order_in_memory(layout, chunk)
    if layout is None or order is None:
        deliver_loaded(reader, io.BytesIO(reader.read_unchecked()), chunk, destination)
        return
    start = layout.payload_offset + layout.storage_offset * chunk.dtype.itemsize
    if order != sorted(order):
        # A transposed or channels-last tensor is a row-major one with its dimensions in another order.
        chunk = chunk._replace(shape=tuple(chunk.shape[d] for d in order))
        destination = _Reordered(destination, order)
    # Also where there is nothing to read: it counts as delivered.
    destination.target()
    inner = ItemReader(
        reader.context,
        reader.file,
        StorageInfo(info.relative_path, info.offset, info.length, None, start),
    )
    # Part of a payload cannot be checked: torch keeps one checksum for the whole.
    is_whole = tuple(destination.item.lengths) == chunk.shape and chunk.nbytes == layout.payload_nbytes
    found = 0
    # Checked while it is in cache.
    for piece in ranges_for(chunk, destination, BLOCK_SIZE if is_whole else SCRATCH):
        reader.context.cancellation.check()
        found = RangeRead(inner, chunk, destination, piece).deliver(found if is_whole else None)
    if is_whole and reader.context.verify and layout.crc32 is not None and found != layout.crc32:
        what = f"has at {info.offset + start} other bytes of its tensor than were written"
        raise reader.damaged(what, ChecksumError, expected=layout.crc32, found=found)


def deliver_loaded(reader: ItemReader, content: io.BytesIO, chunk: Chunk, destination: Destination) -> None:
    """Let torch read a whole container, under its weights-only rules, and copy the box that is wanted."""
    refuse_compressed(content)
    try:
        tensor = torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:
        raise reader.damaged(f"cannot be read: {error}") from error
    found = (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, torch.Tensor) else type(tensor)
    expected = (chunk.shape, chunk.dtype)
    if found != expected:
        what = f"is {found}, where its metadata says {expected}"
        raise reader.damaged(what, expected=expected, found=found)
    item = destination.item
    for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dimension, start, length)
    destination.put((0,) * tensor.dim(), tensor.detach())


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


class _Reordered(Destination):
    """A destination that is seen with its dimensions in another order."""

    def __init__(self, inner: Destination, order: list[int]) -> None:
        item = inner.item

        def reordered(sizes: torch.Size) -> torch.Size:
            return torch.Size([sizes[d] for d in order])

        seen: ReadItem = replace(
            item,
            storage_offsets=reordered(item.storage_offsets),
            dest_offsets=reordered(item.dest_offsets),
            lengths=reordered(item.lengths),
        )
        super().__init__(inner.calls, seen, inner.dtype)
        self.inner = inner
        self.order = order

    def target(self) -> torch.Tensor:
        """Where it goes, in that order."""
        return self.inner.target().permute(self.order)
