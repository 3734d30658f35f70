"""Owns the reading of values that are not tensors: out of their files and to the planner."""

import io
from collections.abc import Callable

from holdfast._contents.item_bytes import naming
from holdfast._contents.object_bytes import read_object
from holdfast._objects.object_streams import LoadedObject
from holdfast._storage.item_reader import ItemReader
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
    stored = read_object(reader)
    return LoadedObject(*stored) if stored.head else io.BytesIO(stored.payload)
