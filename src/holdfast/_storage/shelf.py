"""Where the items of a checkpoint lie: ``Metadata.storage_data``, as columns until somebody looks."""

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from holdfast._deferred import DeferredDict
from holdfast._format.description import OBJECT, Directory, ints
from holdfast._format.manifest import Manifest
from holdfast._storage.record import StorageInfo
from holdfast.metadata import Metadata, MetadataIndex

__all__ = ["Places", "Shelf", "shelf_of"]


class Shelf:
    """The places of a checkpoint's items, by their rows in the manifest.

    Attributes:
        directory: What the checkpoint holds, and which rows are whose.
        files: The names of the files.
        file: For each row the number of its file.
        start: Where its item begins.
        nbytes: How long it is; -1 where the metadata has a chunk and no place for it.
        payload_start: Where the checked bytes begin in it.
        payload_nbytes: How many they are; -1 for what torch wrote.
        checksums: The checksums of all blocks.
        all_are_plain: Whether no item went through transforms.
    """

    def __init__(self, manifest: Manifest, directory: Directory) -> None:
        self.manifest = manifest
        self.directory = directory
        self.files = manifest.file_names
        self.file = ints(manifest.item_files, "I")
        self.start = ints(manifest.item_offsets, "q")
        self.nbytes = ints(manifest.item_nbytes, "q")
        self.payload_start = ints(manifest.item_payload_offsets, "q")
        self.payload_nbytes = ints(manifest.item_payload_nbytes, "q")
        self.checksums = ints(manifest.checksums, "I")
        self._raw = ints(manifest.item_raw_nbytes, "q")
        self._wraps = ints(manifest.item_wrap_checksums, "I")
        self._transforms = ints(manifest.item_transforms, "I")
        # An item without transforms says so by having no descriptors, as torch does.
        self._descriptors = [tuple(stack) or None for stack in manifest.transforms]
        self.all_are_plain = not any(manifest.transforms)

    def __reduce__(self) -> Any:
        return Shelf, (self.manifest, self.directory)

    def __len__(self) -> int:
        return len(self.start)

    @functools.cached_property
    def block_at(self) -> list[int]:
        """For each row the number of its first checksum; the last entry is the number of all."""
        return [0, *itertools.accumulate(ints(self.manifest.item_blocks, "I"))]

    def is_plain(self, row: int) -> bool:
        """Whether an item went through no transforms."""
        return self._descriptors[self._transforms[row]] is None

    def place(self, row: int) -> StorageInfo:
        """An item's place as a record."""
        begin, end = self.block_at[row], self.block_at[row + 1]
        return StorageInfo(
            self.files[self.file[row]],
            self.start[row],
            self.nbytes[row],
            self._descriptors[self._transforms[row]],
            self.payload_start[row],
            self.payload_nbytes[row],
            self._raw[row],
            self.manifest.checksums[4 * begin : 4 * end],
            self._wraps[row],
            self.manifest.block_size,
        )

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
            if offset is None or self.offset(number, chunk) == offset:
                return row + chunk if self.nbytes[row + chunk] >= 0 else None
        return None

    def offset(self, number: int, chunk: int) -> list[int]:
        """Where a chunk of a key begins in its tensor."""
        directory = self.directory
        begin = directory.box_at[number] + chunk * directory.ndim[number]
        return directory.offsets[begin : begin + directory.ndim[number]].tolist()

    def lengths(self, number: int, chunk: int) -> list[int]:
        """How long a chunk of a key is."""
        directory = self.directory
        begin = directory.box_at[number] + chunk * directory.ndim[number]
        return directory.lengths[begin : begin + directory.ndim[number]].tolist()

    def items(self) -> Iterator[tuple[MetadataIndex, StorageInfo]]:
        """All names and places."""
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
                    yield name, self.place(at)


class Places(DeferredDict[MetadataIndex, StorageInfo]):
    """``Metadata.storage_data`` of a checkpoint: records when somebody looks at one."""

    __slots__ = ("shelf",)

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(len(shelf), shelf.items)
        self.shelf = shelf

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol) if self.is_open else (Places, (self.shelf,))


def shelf_of(metadata: Metadata) -> Shelf | None:
    """The columns behind the metadata's places; None if somebody may have changed them."""
    places: Any = metadata.storage_data
    return places.shelf if isinstance(places, Places) and not places.is_open else None
