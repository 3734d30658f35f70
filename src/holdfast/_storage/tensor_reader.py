"""Owns which jobs read a box of a stored tensor: by ranges, through its transforms, or with torch."""

from collections.abc import Callable
from typing import Any

from holdfast._contents.item_bytes import naming
from holdfast._storage.destinations import Destination
from holdfast._storage.item_reader import Chunk, ItemReader
from holdfast._storage.joined_ranges import RangeJob
from holdfast._storage.ranges import RangeRead, ranges_for
from holdfast._storage.torch_written import deliver_torch_written
from holdfast._storage.transformed import deliver_transformed
from holdfast.planner import ReadItem

# One thread reads a large payload in pieces of this, so that several share a single large tensor.
_PIECE = 32 * 1024 * 1024


def tensor_jobs(reader: ItemReader, chunk: Chunk, item: ReadItem) -> list[Callable[[], None]]:
    """Jobs that together read one box of a stored chunk."""
    destination = Destination(reader.context.calls, item, chunk.dtype)
    if reader.info.transform_descriptors:
        return [_job(destination, lambda: deliver_transformed(reader, chunk, destination))]
    if not reader.info.is_located:
        return [_job(destination, lambda: deliver_torch_written(reader, chunk, destination))]
    ranges = list(
        ranges_for(
            chunk,
            destination,
            _PIECE,
            is_checked=reader.is_verified,
            reads_whole_rows=reader.file.store.reads_whole_rows,
            request_nbytes=reader.file.store.traits.request_nbytes,
        )
    )
    if not ranges:
        return [_job(destination, destination.target)]
    destination.waiting = len(ranges)
    return [RangeJob(RangeRead(reader, chunk, destination, piece)) for piece in ranges]


def _job(destination: Destination, work: Callable[[], Any]) -> Callable[[], None]:
    def job() -> None:
        with naming(destination.key):
            work()
            destination.arrived()

    return job
