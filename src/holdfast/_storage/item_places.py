"""Owns where the items of a checkpoint lie: ``Metadata.storage_data``, as columns until somebody looks."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from holdfast._deferred import DeferredDict
from holdfast._format.description import OBJECT, Directory
from holdfast._format.item_table import StorageInfo
from holdfast._format.manifest import Manifest, StoredItems
from holdfast.metadata import Metadata, MetadataIndex


class ItemPlaces(StoredItems):
    """The items of a checkpoint, found by the names that plans give them.

    Attributes:
        directory: What the checkpoint holds, and which rows are whose.
        all_are_plain: Whether no item went through transforms.
    """

    def __init__(self, manifest: Manifest, directory: Directory) -> None:
        super().__init__(manifest)
        self.directory = directory
        self.all_are_plain = not any(manifest.transforms)
        self._transforms = manifest.item_column("transforms")

    def __reduce__(self) -> Any:
        return ItemPlaces, (self.manifest, self.directory)

    def is_plain(self, row: int) -> bool:
        """Whether an item went through no transforms."""
        return not self.manifest.transforms[self._transforms[row]]

    def find(self, index: MetadataIndex) -> int | None:
        """The row of the item that a name means, or None."""
        directory = self.directory
        number = directory.numbers.get(index.fqn)
        if number is None:
            return None
        row, end = directory.row[number], directory.row[number + 1]
        if directory.kinds[number] == OBJECT:
            return row if index.offset is None and self.nbytes[row] >= 0 else None
        offset = None if index.offset is None else list(index.offset)
        hint = index.index
        candidates: Iterable[int] = range(end - row)
        if hint is not None and 0 <= hint < end - row:
            candidates = itertools.chain([hint], candidates)
        for chunk in candidates:
            if offset is None or self._chunk_offset(number, chunk) == offset:
                return row + chunk if self.nbytes[row + chunk] >= 0 else None
        return None

    def has_same_bytes(self, key: str, other: str) -> bool | None:
        """Whether two tensors of one shape are equal, by their checksums; None if these do not tell."""
        directory, properties = self.directory, self.manifest.properties
        one, two = directory.numbers[key], directory.numbers[other]
        rows = range(directory.row[one], directory.row[one + 1])
        others = range(directory.row[two], directory.row[two + 1])
        if (
            properties[directory.properties[one]][0] != properties[directory.properties[two]][0]
            or directory.boxes(one) != directory.boxes(two)
            or not all(self.payload_nbytes[row] >= 0 and self.is_plain(row) for row in (*rows, *others))
        ):
            return None
        pairs = [
            (self._checksums_of(row), self._checksums_of(same))
            for row, same in zip(rows, others, strict=True)
        ]
        return all(a == b for a, b in pairs) if all(a and b for a, b in pairs) else None

    def chunk_shape(self, key: str, row: int) -> list[int]:
        """The shape of the chunk of a key's tensor that a row stores."""
        directory = self.directory
        number = directory.numbers[key]
        begin = directory.box_at[number] + (row - directory.row[number]) * directory.ndim[number]
        return directory.lengths[begin : begin + directory.ndim[number]].tolist()

    def _chunk_offset(self, number: int, chunk: int) -> list[int]:
        directory = self.directory
        begin = directory.box_at[number] + chunk * directory.ndim[number]
        return directory.offsets[begin : begin + directory.ndim[number]].tolist()

    def items(self) -> Iterator[tuple[MetadataIndex, StorageInfo]]:
        """All names and records."""
        directory = self.directory
        for key, number in directory.numbers.items():
            row = directory.row[number]
            if directory.kinds[number] == OBJECT:
                names = [MetadataIndex(key)]
            else:
                names = [
                    MetadataIndex(key, offsets, chunk)
                    for chunk, (offsets, _) in enumerate(directory.boxes(number))
                ]
            for at, name in enumerate(names, row):
                if self.nbytes[at] >= 0:
                    yield name, self.record(at)


class StorageData(DeferredDict[MetadataIndex, StorageInfo]):
    """``Metadata.storage_data`` of a checkpoint: columns, and records when somebody looks at one."""

    __slots__ = ("places",)

    def __init__(self, places: ItemPlaces) -> None:
        super().__init__(places.directory.item_count, places.items)
        self.places = places

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol) if self.is_open else (StorageData, (self.places,))


def places_of(metadata: Metadata) -> ItemPlaces | None:
    """The columns behind ``metadata.storage_data``; None if somebody may have changed it."""
    stored: Any = metadata.storage_data
    return stored.places if isinstance(stored, StorageData) and not stored.is_open else None
