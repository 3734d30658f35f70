"""Owns what a load plan needs of each file: small whole tensors as columns, everything else as records."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast._format.item_table import StorageInfo
from holdfast._plan.metadata_entries import dtypes_of
from holdfast._plan.planner_values import own_values
from holdfast._plan.read_columns import ReadBox, ReadColumns, read_columns_of
from holdfast._storage.item_places import ItemPlaces, places_of
from holdfast._storage.small_reads import SmallTensors, most_nbytes
from holdfast.errors import InvalidPlanError
from holdfast.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from holdfast.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem


class FileRequest:
    """What a plan needs of one file.

    Attributes:
        lines: Stored items and lines, in the order of the file.
        small: Small stored tensors that go whole and straight into the state; None if there are none.
        last: The key of the item that reaches furthest, and the size that the file must have for it.
        nbytes: About how many bytes are read; of a part of an item not less than that part.
    """

    def __init__(self) -> None:
        self.lines: list[tuple[StorageInfo, ReadItem]] = []
        self.small: SmallTensors | None = None
        self.last = "", 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self.lines) + (len(self.small.keys) if self.small else 0)

    def add_line(self, info: StorageInfo, item: ReadItem) -> None:
        """A line that is read as a record."""
        self.lines.append((info, item))
        part = info.length if item.type == LoadItemType.BYTE_IO else 8 * item.lengths.numel()
        self.nbytes += min(info.length, part)
        self._reach(info.end, item.dest_index.fqn)

    def add_rows(
        self,
        lines: list[tuple[int, str, ReadBox | None]],
        places: ItemPlaces,
        dtypes: Sequence[torch.dtype],
        values: Mapping[str, Any],
    ) -> None:
        """Small stored items that are read whole: the row and key of each, and the box that it fills."""
        offsets, nbytes = places.offsets, places.nbytes
        lines.sort(key=lambda line: offsets[line[0]])
        rows, keys, boxes = map(list, zip(*lines, strict=True))
        self.small = SmallTensors.of_rows(rows, keys, places, dtypes, values, boxes)
        self.nbytes += sum(nbytes[row] for row in rows)
        ends = [offsets[row] + nbytes[row] for row in rows]
        self._reach(max(ends), keys[ends.index(max(ends))])

    def _reach(self, end: int, key: str) -> None:
        if end > self.last[1] or not self.last[0]:
            self.last = key, end


def sort_by_file(plan: LoadPlan, planner: LoadPlanner, metadata: Metadata) -> dict[str, FileRequest]:
    """What a plan needs of each file, in the order of the file.

    Raises:
        InvalidPlanError: The plan asks for an item that the checkpoint does not have.
    """
    places = places_of(metadata)
    columns = columns_in(plan, places)
    if columns is not None and places is not None:
        requests = _from_columns(columns, own_values(planner, "resolve_tensor"), places, metadata)
    else:
        requests = {}
        for item in plan.items:
            info = _find(item.storage_index, places, metadata)
            requests.setdefault(info.relative_path, FileRequest()).add_line(info, item)
    for request in requests.values():
        request.lines.sort(key=lambda line: line[0].offset)
    return requests


def columns_in(plan: LoadPlan, places: ItemPlaces | None) -> ReadColumns | None:
    """The lines of a plan as rows of these places; None if somebody may have changed either."""
    columns = read_columns_of(plan)
    is_here = columns is not None and places is not None and columns.directory is places.directory
    return columns if is_here else None


def nbytes_to_read(plan: LoadPlan, metadata: Metadata) -> int:
    """About how many bytes a plan reads: containers, and blocks that are read to be checked, come on top."""
    places, total = places_of(metadata), 0
    columns = read_columns_of(plan)
    for item in plan.items if columns is None else columns.items():
        entry = metadata.state_dict_metadata[item.storage_index.fqn]
        if isinstance(entry, TensorStorageMetadata):
            total += item.lengths.numel() * entry.properties.dtype.itemsize
        else:
            total += _find(item.storage_index, places, metadata).length
    return total


def _from_columns(
    columns: ReadColumns, values: Mapping[str, Any] | None, places: ItemPlaces, metadata: Metadata
) -> dict[str, FileRequest]:
    requests: dict[str, FileRequest] = {}
    small: dict[int, list[tuple[int, str, ReadBox | None]]] = {}
    files, nbytes, kinds = places.files, places.payload_nbytes, places.directory.kinds
    numbers, boxes, all_are_plain = places.directory.numbers, columns.boxes, places.all_are_plain
    names, most = places.manifest.file_names, most_nbytes(places.manifest.block_size)
    for number, (key, row) in enumerate(zip(columns.keys, columns.rows, strict=True)):
        box = boxes.get(number)
        if (
            values is not None
            and 0 <= nbytes[row] <= most
            and (box is None or box.is_whole)
            and not kinds[numbers[key]]
            and (all_are_plain or places.is_plain(row))
        ):
            small.setdefault(files[row], []).append((row, key, box))
            continue
        line = columns.item(number)
        if places.nbytes[row] < 0:
            raise _no_such_chunk(line.storage_index)
        requests.setdefault(names[files[row]], FileRequest()).add_line(places.record(row), line)
    for file, rows in small.items():
        assert values is not None
        request = requests.setdefault(names[file], FileRequest())
        request.add_rows(rows, places, dtypes_of(metadata), values)
    return requests


def _find(index: MetadataIndex, places: ItemPlaces | None, metadata: Metadata) -> StorageInfo:
    info: StorageInfo | None
    if places is None:
        # The record of a tensor in safetensors files is torch's, with ours in it.
        stored = metadata.storage_data.get(index)
        info = getattr(stored, "place", stored)
    else:
        row = places.find(index)
        info = None if row is None else places.record(row)
    if info is None:
        raise _no_such_chunk(index)
    return info


def _no_such_chunk(index: MetadataIndex) -> InvalidPlanError:
    return InvalidPlanError(f"{index.fqn}: the checkpoint has no chunk at {index.offset}", key=index.fqn)


def chunk_of(index: MetadataIndex, metadata: Metadata) -> tuple[torch.Size, torch.dtype]:
    """The shape and dtype of a stored chunk."""
    entry = metadata.state_dict_metadata[index.fqn]
    assert isinstance(entry, TensorStorageMetadata)
    chunks, hint = entry.chunks, index.index
    box = chunks[hint] if hint is not None and hint < len(chunks) else None
    if box is None or box.offsets != index.offset:
        box = next((c for c in chunks if index.offset is None or c.offsets == index.offset), None)
    if box is None:
        raise _no_such_chunk(index)
    return box.sizes, entry.properties.dtype
