"""Values that are not tensors, out of their files and into the planner's hands."""

import io
from collections.abc import Callable

from holdfast._objects import LoadedObject, is_bytearray
from holdfast._storage.source import Source, filled, naming
from holdfast._storage.transformed import read_transformed
from holdfast.planner import ReadItem

__all__ = ["object_job"]


def object_job(source: Source, item: ReadItem) -> Callable[[], None]:
    """A job that reads one value and hands it over."""

    def job() -> None:
        counter, key = source.context.counter, item.dest_index.fqn
        with naming(key):
            stream = _read(source)
            with counter.lock:
                counter.planner.load_bytes(item, stream)
                counter.touched.append(key)

    return job


def _read(source: Source) -> io.BytesIO:
    place = source.place
    if place.transform_descriptors:
        return io.BytesIO(read_transformed(source))
    if not place.is_checked:
        return io.BytesIO(
            filled(place.length, lambda view: source.file.reader().read_into(place.offset, view))
        )
    head, tail = source.read_wrap()
    if is_bytearray(head):
        content = bytearray(place.payload_nbytes)
        source.read(0, memoryview(content))
        return LoadedObject(head, content, tail)
    payload = filled(place.payload_nbytes, lambda view: source.read(0, view))
    return LoadedObject(head, payload, tail) if head else io.BytesIO(payload)
