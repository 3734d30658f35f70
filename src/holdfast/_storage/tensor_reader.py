"""Boxes of stored tensors to their destinations: straight into the memory where that can be."""

from collections.abc import Callable
from typing import Any

from holdfast._storage.delivery import Delivery
from holdfast._storage.parts import Reading, parts_for
from holdfast._storage.source import Chunk, Source, naming
from holdfast._storage.torch_written import deliver_torch_written
from holdfast._storage.transformed import deliver_transformed
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
        return [_job(delivery, lambda: deliver_torch_written(source, chunk, delivery))]
    parts = list(parts_for(chunk, delivery, _PIECE))
    if not parts:
        return [_job(delivery, delivery.target)]
    delivery.waiting = len(parts)
    return [_job(delivery, Reading(source, chunk, delivery, part).deliver) for part in parts]


def _job(delivery: Delivery, work: Callable[[], Any]) -> Callable[[], None]:
    def job() -> None:
        with naming(delivery.key):
            work()
            delivery.arrived()

    return job
