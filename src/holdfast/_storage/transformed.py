"""Items behind stream transforms: undone from front to back, never larger than declared."""

import io
from collections.abc import Iterator
from typing import Any

import torch

from holdfast._format.torch_item import tensor_item
from holdfast._io.blocks import crc32
from holdfast._storage.delivery import Delivery
from holdfast._storage.loaded import deliver_loaded
from holdfast._storage.source import Chunk, Source
from holdfast._tensors.host import memory_of
from holdfast.errors import ChecksumError, IntegrityError, MetadataFormatError
from holdfast.extension import StreamTransformExtension

__all__ = ["deliver_transformed", "read_transformed", "undo_transforms"]

_STEP = 1 << 20
_MOST_TRANSFORMS = 32
_ROWS = 4 << 20
# What torch wrote does not say how large an object is behind its transforms.
_LARGEST_UNDECLARED = 4 << 30


def undo_transforms(source: Source) -> Any:
    """The item's container as a stream."""
    stream: Any = source.stream()
    descriptors = list(source.place.transform_descriptors or ())
    if len(descriptors) > _MOST_TRANSFORMS:
        raise MetadataFormatError(
            f"{source.file.path}: the item at {source.place.offset} has {len(descriptors)} transforms; more "
            f"than {_MOST_TRANSFORMS} are not undone",
            path=source.file.path,
            found=len(descriptors),
        )
    for extension in source.context.registry.from_descriptor_list(descriptors):
        if isinstance(extension, StreamTransformExtension):
            stream = extension.transform_from(stream)
    return stream


def read_transformed(source: Source, *, limit: int = _LARGEST_UNDECLARED) -> bytes:
    """The whole container.

    Raises:
        IntegrityError: It is larger than declared, or than ``limit`` where nothing is declared.
    """
    place = source.place
    declared = place.raw_nbytes if place.raw_nbytes >= 0 else None
    limit = limit if declared is None else declared
    collected, stream = io.BytesIO(), undo_transforms(source)
    while piece := stream.read(_STEP):
        collected.write(piece)
        if collected.tell() > limit:
            raise IntegrityError(
                f"{source.file.path}: the item at {place.offset} inflates beyond {limit} bytes",
                path=source.file.path,
                expected=limit,
            )
    if declared is not None and collected.tell() != declared:
        raise IntegrityError(
            f"{source.file.path}: the item at {place.offset} has {collected.tell()} bytes behind its "
            f"transforms, expected {declared}",
            path=source.file.path,
            expected=declared,
            found=collected.tell(),
        )
    return collected.getvalue()


def deliver_transformed(source: Source, chunk: Chunk, delivery: Delivery) -> None:
    """Read a chunk from its beginning, a few rows at a time, and keep of it what the box needs."""
    if not source.place.is_checked:
        # Inside is a container of torch's, which is little more than the elements.
        content = read_transformed(source, limit=chunk.nbytes + _STEP)
        deliver_loaded(io.BytesIO(content), chunk, delivery)
        return
    stream = undo_transforms(source)
    frame = tensor_item(str(chunk.dtype)[6:], chunk.shape)
    _fill(stream, memoryview(bytearray(frame.payload_offset(0))), source)
    memory = delivery.memory() if delivery.item.lengths == chunk.shape else None
    checksum = (
        _fill(stream, memory, source)
        if memory is not None
        else _deliver_by_rows(source, stream, chunk, delivery)
    )
    tail = frame.tail(0, checksum)
    if _read_rest(stream, len(tail) + 1) != tail:
        raise ChecksumError(
            f"{source.file.path}: the item at {source.place.offset} is not what was saved, once its "
            "transforms are undone",
            path=source.file.path,
        )


def _deliver_by_rows(source: Source, stream: Any, chunk: Chunk, delivery: Delivery) -> int:
    """Keep what the box needs of each group of rows; the checksum of all of them."""
    checksum, done, groups = 0, 0, list(_row_groups(chunk))
    largest = max((torch.Size(shape).numel() for shape in groups), default=0)
    with source.context.budget.hold(largest * chunk.dtype.itemsize):
        # Taken once: memory that is freed and taken again for each group stays with the thread's heap.
        scratch = torch.empty(largest, dtype=chunk.dtype)
        for shape in groups:
            rows = scratch[: torch.Size(shape).numel()].view(shape)
            checksum = _fill(stream, memory_of(rows), source, checksum)
            _deliver_rows(rows, done, delivery)
            done += shape[0] if shape else 0
    delivery.target()
    return checksum


def _read_rest(stream: Any, most: int) -> bytes:
    rest = b""
    while len(rest) < most and (piece := stream.read(most - len(rest))):
        rest += piece
    return rest


def _fill(stream: Any, view: memoryview, source: Source, checksum: int = 0) -> int:
    """Fill ``view`` from the stream, and continue the checksum while the bytes are in cache."""
    done = 0
    while done < len(view):
        count = stream.readinto(view[done : done + _STEP])
        if not count:
            raise IntegrityError(
                f"{source.file.path}: the item at {source.place.offset} ends before its tensor does, once "
                "its transforms are undone",
                path=source.file.path,
            )
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


def _deliver_rows(rows: torch.Tensor, first_row: int, delivery: Delivery) -> None:
    """Copy the part of some rows of a chunk that is in the box."""
    item = delivery.item
    if rows.dim() == 0:
        delivery.put((), rows)
        return
    box_at, box_rows = item.storage_offsets[0], item.lengths[0]
    begin, end = max(first_row, box_at), min(first_row + rows.shape[0], box_at + box_rows)
    if end <= begin:
        return
    part = rows[begin - first_row : end - first_row]
    for dimension in range(1, part.dim()):
        part = part.narrow(dimension, item.storage_offsets[dimension], item.lengths[dimension])
    delivery.put((begin - box_at, *[0] * (part.dim() - 1)), part)
