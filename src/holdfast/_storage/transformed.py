"""Owns the reading of items with stream transforms: undone from front to back, never larger than declared."""

import io
from collections.abc import Iterator
from typing import Any

import torch

from holdfast._contents.item_bytes import read_transformed, undo_transforms
from holdfast._format.torch_item import tensor_item
from holdfast._io.blocks import crc32
from holdfast._storage.destinations import Destination
from holdfast._storage.item_reader import Chunk, ItemReader
from holdfast._storage.torch_written import deliver_loaded
from holdfast._tensors.host import memory_of
from holdfast.errors import ChecksumError

_STEP = 1 << 20
_ROWS = 4 << 20


def deliver_transformed(reader: ItemReader, chunk: Chunk, destination: Destination) -> None:
    """Read a chunk from its beginning, a few rows at a time, and keep of it what the box needs."""
    if not reader.info.is_located:
        # Inside is a container of torch's, which is little more than the elements.
        content = read_transformed(reader, limit=chunk.nbytes + _STEP)
        deliver_loaded(reader, io.BytesIO(content), chunk, destination)
        return
    stream = undo_transforms(reader)
    frame = tensor_item(str(chunk.dtype)[6:], chunk.shape)
    _fill(stream, memoryview(bytearray(frame.payload_offset(0))), reader)
    memory = destination.memory() if destination.item.lengths == chunk.shape else None
    if memory is not None:
        destination.touch()
    checksum = (
        _fill(stream, memory, reader)
        if memory is not None
        else _deliver_by_rows(reader, stream, chunk, destination)
    )
    tail = frame.tail(0, checksum)
    if _read_rest(stream, len(tail) + 1) != tail:
        raise reader.damaged("is not what was saved, once its transforms are undone", ChecksumError)


def _deliver_by_rows(reader: ItemReader, stream: Any, chunk: Chunk, destination: Destination) -> int:
    """Keep what the box needs of each group of rows; the checksum of all of them."""
    checksum, done, groups = 0, 0, list(_row_groups(chunk))
    largest = max((torch.Size(shape).numel() for shape in groups), default=0)
    with reader.context.budget.hold(largest * chunk.dtype.itemsize):
        # Taken once: memory that is freed and taken again for each group stays with the thread's heap.
        scratch = torch.empty(largest, dtype=chunk.dtype)
        for shape in groups:
            rows = scratch[: torch.Size(shape).numel()].view(shape)
            checksum = _fill(stream, memory_of(rows), reader, checksum)
            _deliver_rows(rows, done, destination)
            done += shape[0] if shape else 0
    destination.target()
    return checksum


def _read_rest(stream: Any, most: int) -> bytes:
    rest = b""
    while len(rest) < most and (piece := stream.read(most - len(rest))):
        rest += piece
    return rest


def _fill(stream: Any, view: memoryview, reader: ItemReader, checksum: int = 0) -> int:
    """Fill ``view`` from the stream, and continue the checksum while the bytes are in cache."""
    done = 0
    while done < len(view):
        count = stream.readinto(view[done : done + _STEP])
        if not count:
            raise reader.damaged("ends before its tensor does, once its transforms are undone")
        checksum = crc32(view[done : done + count], checksum)
        done += count
    return checksum


def _row_groups(chunk: Chunk) -> Iterator[tuple[int, ...]]:
    """Shapes of groups of rows that together are the chunk, each of a few MiB."""
    if not chunk.shape:
        yield ()
        return
    row = torch.Size(chunk.shape[1:]).numel() * chunk.dtype.itemsize
    step = max(1, _ROWS // max(1, row))
    for start in range(0, chunk.shape[0], step):
        yield (min(step, chunk.shape[0] - start), *chunk.shape[1:])


def _deliver_rows(rows: torch.Tensor, first_row: int, destination: Destination) -> None:
    """Copy the part of some rows of a chunk that is in the box."""
    item = destination.item
    if rows.dim() == 0:
        destination.put((), rows)
        return
    box_at, box_rows = item.storage_offsets[0], item.lengths[0]
    begin, end = max(first_row, box_at), min(first_row + rows.shape[0], box_at + box_rows)
    if end <= begin:
        return
    part = rows[begin - first_row : end - first_row]
    for dimension in range(1, part.dim()):
        part = part.narrow(dimension, item.storage_offsets[dimension], item.lengths[dimension])
    destination.put((begin - box_at, *[0] * (part.dim() - 1)), part)
