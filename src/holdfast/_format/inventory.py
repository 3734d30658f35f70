"""One torch-free view of what a checkpoint holds, whoever wrote it: Holdfast or torch."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

from holdfast._format import metadata_file
from holdfast._format.dtypes import DTYPES
from holdfast._format.manifest import Item, Manifest, decode, ints
from holdfast._format.paths import decode_paths
from holdfast._format.torch_pickle_records import TorchMetadata, TorchStorage, TorchTensor
from holdfast.errors import MetadataFormatError

__all__ = ["Inventory", "StoredChunk", "StoredObject", "StoredTensor", "read_inventory"]


Ints: TypeAlias = tuple[int, ...]


class StoredChunk(NamedTuple):
    """A box of a tensor and the item that holds it.

    Attributes:
        offsets: Where in the tensor it begins.
        lengths: How far it reaches.
        item: Where it lies. None if the metadata names no place for it, so that it cannot be loaded. Of an
            item that torch wrote, ``payload_nbytes`` and ``raw_nbytes`` are -1 and there are no checksums.
    """

    offsets: Ints
    lengths: Ints
    item: Item | None


class StoredTensor(NamedTuple):
    """A tensor; ``nbytes`` counts its elements, None for a dtype that this version does not know."""

    key: str
    dtype: str
    shape: Ints
    nbytes: int | None
    chunks: list[StoredChunk]


class StoredObject(NamedTuple):
    """A value that is not a tensor."""

    key: str
    item: Item | None


@dataclass(frozen=True)
class Inventory:
    """What one metadata file says of a checkpoint. What it does not say is None.

    Attributes:
        source: Who wrote it.
        path: The metadata file, for messages.
        rank: For a rank's own part of a checkpoint (``__3.metadata``), that rank.
        nbytes: The size of the metadata file.
        format: The format's name and version.
        torch_readable: Whether there is a part that stock torch reads.
        software: What made it.
        created_ns: When, in nanoseconds since 1970.
        world_size: How many ranks took part.
        save_id: The name that the save gave itself.
        checkpoint_id: Where it was saved, in the words of the one who did.
        block_size: The unit of checksums.
        entries: Tensors and objects in the order of the checkpoint.
        files: The data files, each with the size that it must have; for torch's, at least.
    """

    source: Literal["holdfast", "torch"]
    path: str
    rank: int | None
    nbytes: int
    format: str
    torch_readable: bool
    software: str | None
    created_ns: int | None
    world_size: int | None
    save_id: str | None
    checkpoint_id: str | None
    block_size: int | None
    entries: list[StoredTensor | StoredObject]
    files: dict[str, int]
    _steps: Any = field(repr=False)

    @property
    def tensors(self) -> list[StoredTensor]:
        """The tensors alone."""
        return [entry for entry in self.entries if isinstance(entry, StoredTensor)]

    @property
    def objects(self) -> list[StoredObject]:
        """The objects alone."""
        return [entry for entry in self.entries if isinstance(entry, StoredObject)]

    def items(self) -> Iterator[tuple[str, StoredChunk | None, Item | None]]:
        """Each item's key, its chunk (None for an object) and its place."""
        for entry in self.entries:
            if isinstance(entry, StoredObject):
                yield entry.key, None, entry.item
            else:
                for chunk in entry.chunks:
                    yield entry.key, chunk, chunk.item

    @cached_property
    def transforms(self) -> dict[tuple[str, ...], int]:
        """How many items went through each stack of transforms, in the order in which a reader undoes it."""
        return dict(Counter(item.descriptors for _, _, item in self.items() if item and item.descriptors))

    @cached_property
    def paths(self) -> dict[str, tuple[Any, ...]]:
        """The way to each key through dicts (str, or TypedKey) and lists (int), as far as it is recorded.

        Raises:
            MetadataFormatError: A manifest has a path that cannot be.
        """
        if self.source == "holdfast":
            keys = [entry.key for entry in self.entries]
            return decode_paths(keys, self._steps, path=self.path) if self._steps else {}
        if not isinstance(self._steps, dict):
            return {}
        return {
            key: path
            for key, path in self._steps.items()
            if isinstance(path, tuple) and all(isinstance(step, str | int) for step in path)
        }


def read_inventory(data: bytes | bytearray, *, path: str, rank: int | None = None) -> Inventory:
    """Read a metadata file. No code in it runs.

    Args:
        data: Its content.
        path: Its name, for messages.
        rank: The rank in its name, if there is one.

    Raises:
        MetadataFormatError: It is damaged, or of a newer format; then ``expected`` is set.
        UnsafeMetadataError: It asks for code to be run, or for files outside of the folder.
    """
    sections = metadata_file.split(data, path=path)
    if sections.manifest is None:
        # An eighth of the time that `holdfast ls` may take, and only checkpoints of torch need it.
        from holdfast._format.torch_pickle import read_torch_metadata  # noqa: PLC0415

        return _from_torch(read_torch_metadata(sections.pickle, path=path), len(data), path, rank)
    has_pickle = len(sections.pickle) > 0
    return _from_manifest(decode(sections.manifest, path=path), len(data), path, rank, has_pickle)


def _nbytes(dtype: str, shape: Ints) -> int | None:
    known = DTYPES.get(dtype)
    return None if known is None else known.itemsize * math.prod(shape)


def _from_manifest(
    manifest: Manifest, nbytes: int, path: str, rank: int | None, torch_readable: bool
) -> Inventory:
    items = manifest.items()
    dtypes = [dtype for dtype, *_ in manifest.properties]
    entries: list[StoredTensor | StoredObject] = []
    for key, properties, numbers, boxes in manifest.entries():
        if properties is None:
            entries.append(StoredObject(key, next(items)))
            continue
        shape, dtype = tuple(numbers), dtypes[properties]
        chunks = [StoredChunk(tuple(offsets), tuple(lengths), next(items)) for offsets, lengths in boxes]
        entries.append(StoredTensor(key, dtype, shape, _nbytes(dtype, shape), chunks))
    major, minor = manifest.version
    return Inventory(
        source="holdfast",
        path=path,
        rank=rank,
        nbytes=nbytes,
        format=f"holdfast {major}.{minor}",
        torch_readable=torch_readable,
        software=manifest.software,
        created_ns=manifest.created_ns,
        world_size=manifest.world_size,
        save_id=manifest.save_id or None,
        checkpoint_id=manifest.checkpoint_id,
        block_size=manifest.block_size,
        entries=entries,
        files=dict(zip(manifest.file_names, ints(manifest.file_nbytes, "q"), strict=True)),
        _steps=manifest.paths,
    )


def _from_torch(stored: TorchMetadata, nbytes: int, path: str, rank: int | None) -> Inventory:
    meta = stored.storage_meta
    if meta is not None and metadata_file.MARK in meta.modules:
        raise MetadataFormatError(
            f"{path} is damaged: it was written by holdfast and has lost its end. Restore the file, or load "
            "another checkpoint.",
            path=path,
        )
    files: dict[str, int] = {}
    for place in stored.storage.values():
        files[place.path] = max(files.get(place.path, 0), place.offset + place.nbytes)
    return Inventory(
        source="torch",
        path=path,
        rank=rank,
        nbytes=nbytes,
        format=f"torch {stored.version}" if stored.version else "torch",
        torch_readable=True,
        software=None,
        created_ns=None,
        world_size=None,
        save_id=meta.save_id if meta else None,
        checkpoint_id=meta.checkpoint_id if meta else None,
        block_size=None,
        entries=_torch_entries(stored),
        files=files,
        _steps=stored.planner_data,
    )


def _torch_entries(stored: TorchMetadata) -> list[StoredTensor | StoredObject]:
    places = stored.storage
    entries: list[StoredTensor | StoredObject] = []
    for key, entry in stored.entries.items():
        if not isinstance(entry, TorchTensor):
            entries.append(StoredObject(key, _torch_item(places.get((key, None)))))
            continue
        dtype = entry.properties.dtype
        chunks = [
            StoredChunk(offsets, lengths, _torch_item(places.get((key, offsets))))
            for offsets, lengths in entry.chunks
        ]
        entries.append(StoredTensor(key, dtype, entry.shape, _nbytes(dtype, entry.shape), chunks))
    return entries


def _torch_item(place: TorchStorage | None) -> Item | None:
    if place is None:
        return None
    # torch's writer records a stack of transforms in the order of writing; a reader undoes it backwards.
    undone = tuple(reversed(place.descriptors)) or None
    return Item(place.path, place.offset, place.nbytes, undone, 0, -1, -1, b"", 0)
