"""Owns the reading of values that are not tensors: small neighbours in one request."""

import io
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter

from holdfast._contents.item_bytes import ItemBytes, ItemFile, naming
from holdfast._contents.object_bytes import read_object
from holdfast._contents.open_files import StoredFile
from holdfast._contents.read_window import group_neighbours, read_window
from holdfast._format.item_table import StorageInfo
from holdfast._objects.object_streams import LoadedObject
from holdfast._storage.destinations import ReadContext
from holdfast.planner import ReadItem

_Line = tuple[StorageInfo, ReadItem]
_Lines = Sequence[_Line]


def object_jobs(context: ReadContext, file: StoredFile, lines: _Lines) -> list[Callable[[], None]]:
    """Jobs that read values of one file and give them to the planner.

    A flattened optimizer has a dozen numbers for each parameter: read one by one, each takes three calls to
    the file and three exchanges of the interpreter's lock.

    Args:
        context: How they are read.
        file: Where they lie.
        lines: Where in it each lies, in the order of the file, and its line of the plan.
    """
    groups = group_neighbours(lines, itemgetter(0), file.store.traits)
    return [partial(_read, context, file, group) for group in groups]


def _read(context: ReadContext, file: StoredFile, lines: _Lines) -> None:
    if len(lines) == 1:
        _deliver(context, file.path, [_stream_of(context, file, line) for line in lines])
        return
    infos = [info for info, _ in lines]
    with context.budget.hold(2 * (infos[-1].end - infos[0].offset)):  # each value is copied out
        window = read_window(file, infos, verify=context.verify)
        _deliver(context, file.path, [_stream_of(context, window, line) for line in lines])


def _stream_of(context: ReadContext, file: ItemFile, line: _Line) -> tuple[ReadItem, io.BytesIO]:
    info, item = line
    with naming(item.dest_index.fqn):
        stored = read_object(ItemBytes(context, file, info))
    return item, LoadedObject(*stored) if stored.head else io.BytesIO(stored.payload)


def _deliver(context: ReadContext, path: str, values: Sequence[tuple[ReadItem, io.BytesIO]]) -> None:
    """Give values to the planner. Threads that took turns for each would wait for most of the time."""
    calls = context.calls
    with calls.lock:
        for item, stream in values:
            with naming(item.dest_index.fqn, path):
                calls.planner.load_bytes(item, stream)
            calls.touched.append(item.dest_index.fqn)
