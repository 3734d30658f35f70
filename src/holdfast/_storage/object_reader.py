"""Owns the reading of values that are not tensors: out of their files and to the planner."""

import io
from collections.abc import Callable

from holdfast._objects import LoadedObject, is_bytearray
from holdfast._storage.item_reader import ItemReader, naming
from holdfast._storage.transformed import read_transformed
from holdfast.planner import ReadItem


def object_job(reader: ItemReader, item: ReadItem) -> Callable[[], None]:
    """A job that reads one value and gives it to the planner."""

    def job() -> None:
        calls, key = reader.context.calls, item.dest_index.fqn
        with naming(key):
            stream = _read(reader)
            with calls.lock:
                calls.planner.load_bytes(item, stream)
                calls.touched.append(key)

    return job


def _read(reader: ItemReader) -> io.BytesIO:
    info = reader.info
    if info.transform_descriptors:
        return io.BytesIO(read_transformed(reader))
    if not info.is_located:
        return io.BytesIO(reader.read_unchecked())
    head, tail = reader.read_wrap()
    if is_bytearray(head):
        content = bytearray(info.payload_nbytes)
        reader.read(0, memoryview(content))
        return LoadedObject(head, content, tail)
    payload = reader.read_payload()
    return LoadedObject(head, payload, tail) if head else io.BytesIO(payload)
