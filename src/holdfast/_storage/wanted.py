"""What a plan wants of each file: small whole tensors as columns, everything else as records."""

from collections.abc import Mapping
from operator import add
from typing import Any

import torch

from holdfast._plan.metadata_entries import dtypes_of
from holdfast._plan.planner_values import own_values
from holdfast._plan.read_columns import ReadColumns, ReadItems
from holdfast._storage.packs import SMALL
from holdfast._storage.record import StorageInfo
from holdfast._storage.shelf import Shelf, shelf_of
from holdfast._storage.source import Chunk
from holdfast.errors import InvalidPlanError, MetadataFormatError
from holdfast.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from holdfast.planner import LoadPlan, LoadPlanner, ReadItem

__all__ = ["Wanted", "WholeTensors", "chunk_of", "sort_by_file"]


class WholeTensors:
    """Small tensors of one file that are wanted as they were saved, in the state's own memory.

    Attributes:
        keys: The key of each, in the order of the file.
        rows: The row of each.
        shelf: Where the rows' items lie.
        dtypes: The dtype of each key's tensor.
        values: The state's tensors by key.
    """

    def __init__(
        self, lines: list[tuple[int, str]], shelf: Shelf, metadata: Metadata, values: Mapping[str, Any]
    ) -> None:
        lines.sort(key=lambda line: shelf.start[line[0]])
        self.rows = [row for row, _ in lines]
        self.keys = [key for _, key in lines]
        self.shelf = shelf
        self.values = values
        self._dtypes = dtypes_of(metadata)

    def dtype(self, key: str) -> torch.dtype:
        """The dtype that a tensor was saved with."""
        directory = self.shelf.directory
        return self._dtypes[directory.properties[directory.numbers[key]]]


class Wanted:
    """What is wanted of one file.

    Attributes:
        lines: Places and lines, in the order of the file.
        whole: Small whole tensors; None if there are none.
    """

    def __init__(self) -> None:
        self.lines: list[tuple[StorageInfo, ReadItem]] = []
        self.whole: WholeTensors | None = None

    def __len__(self) -> int:
        return len(self.lines) + (len(self.whole.rows) if self.whole else 0)

    def first_key(self) -> str:
        """One of the keys."""
        return self.lines[0][1].dest_index.fqn if self.lines else self.whole.keys[0]  # type: ignore[union-attr]

    def reaching_beyond(self, size: int) -> tuple[str, int] | None:
        """The key and the end of an item that a file of this size cannot hold."""
        for place, item in self.lines:
            if place.offset + place.length > size:
                return item.dest_index.fqn, place.offset + place.length
        if self.whole is not None:
            shelf, rows = self.whole.shelf, self.whole.rows
            starts, lengths = map(shelf.start.__getitem__, rows), map(shelf.nbytes.__getitem__, rows)
            for key, end in zip(self.whole.keys, map(add, starts, lengths), strict=True):
                if end > size:
                    return key, end
        return None


def sort_by_file(plan: LoadPlan, planner: LoadPlanner, metadata: Metadata) -> dict[str, Wanted]:
    """What is wanted of each file, in the order of the file.

    Raises:
        InvalidPlanError: The plan asks for an item that the checkpoint does not have.
    """
    shelf = shelf_of(metadata)
    lines: Any = plan.items
    if isinstance(lines, ReadItems) and lines.columns is not None and shelf is not None:
        columns = lines.columns
        if columns.directory is shelf.directory:
            return _from_columns(columns, own_values(planner, "resolve_tensor"), shelf, metadata)
    wanted: dict[str, Wanted] = {}
    places = metadata.storage_data if shelf is None else None
    for item in lines:
        place = _find(item.storage_index, shelf, places)
        wanted.setdefault(place.relative_path, Wanted()).lines.append((place, item))
    return _in_order(wanted)


def _from_columns(
    columns: ReadColumns, values: Mapping[str, Any] | None, shelf: Shelf, metadata: Metadata
) -> dict[str, Wanted]:
    wanted: dict[str, Wanted] = {}
    whole: dict[int, list[tuple[int, str]]] = {}
    file, nbytes, kinds = shelf.file, shelf.payload_nbytes, shelf.directory.kinds
    numbers, boxes, plain = shelf.directory.numbers, columns.boxes, shelf.all_are_plain
    for number, (key, row) in enumerate(zip(columns.keys, columns.rows, strict=True)):
        if (
            values is not None
            and 0 <= nbytes[row] < SMALL
            and number not in boxes
            and not kinds[numbers[key]]
            and (plain or shelf.is_plain(row))
        ):
            whole.setdefault(file[row], []).append((row, key))
            continue
        if shelf.nbytes[row] < 0:
            raise _no_such_chunk(columns.item(number).storage_index)
        of_file = wanted.setdefault(shelf.files[file[row]], Wanted())
        of_file.lines.append((shelf.place(row), columns.item(number)))
    for file_number, rows in whole.items():
        of_file = wanted.setdefault(shelf.files[file_number], Wanted())
        assert values is not None
        of_file.whole = WholeTensors(rows, shelf, metadata, values)
    return _in_order(wanted)


def _in_order(wanted: dict[str, Wanted]) -> dict[str, Wanted]:
    for of_file in wanted.values():
        of_file.lines.sort(key=_offset)
    return wanted


def _offset(wanted: tuple[StorageInfo, ReadItem]) -> int:
    return wanted[0].offset


def _find(index: MetadataIndex, shelf: Shelf | None, places: Any) -> StorageInfo:
    if shelf is None:
        place: StorageInfo | None = places.get(index)
    else:
        row = shelf.find(index)
        place = None if row is None else shelf.place(row)
    if place is None:
        raise _no_such_chunk(index)
    return place


def _no_such_chunk(index: MetadataIndex) -> InvalidPlanError:
    return InvalidPlanError(f"{index.fqn}: the checkpoint has no chunk at {index.offset}", key=index.fqn)


def chunk_of(place: StorageInfo, index: MetadataIndex, metadata: Metadata) -> Chunk:
    """What a stored chunk is.

    Raises:
        MetadataFormatError: What is stored is not as large as the chunk that is described.
    """
    entry = metadata.state_dict_metadata[index.fqn]
    assert isinstance(entry, TensorStorageMetadata)
    chunks, hint = entry.chunks, index.index
    box = chunks[hint] if hint is not None and hint < len(chunks) else None
    if box is None or box.offsets != index.offset:
        box = next((c for c in chunks if index.offset is None or c.offsets == index.offset), None)
    if box is None:
        raise _no_such_chunk(index)
    chunk = Chunk(place, box.sizes, entry.properties.dtype)
    if place.is_checked and not place.transform_descriptors and place.payload_nbytes != chunk.nbytes:
        raise MetadataFormatError(
            f"{index.fqn}: a chunk of shape {tuple(box.sizes)} of {chunk.dtype} takes {chunk.nbytes} bytes, "
            f"but the metadata has {place.payload_nbytes}",
            key=index.fqn,
            expected=chunk.nbytes,
            found=place.payload_nbytes,
        )
    return chunk
