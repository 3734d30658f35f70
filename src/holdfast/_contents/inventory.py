"""One torch-free view of what a checkpoint holds, whatever its format."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from holdfast._contents.nested_state import Container
from holdfast._format import metadata_file
from holdfast._format.description import OBJECT, ints
from holdfast._format.dtypes import DTYPES
from holdfast._format.item_table import StorageInfo
from holdfast._format.manifest import Manifest, StoredItems, decode, decode_user_metadata
from holdfast._format.paths import decode_containers, decode_paths
from holdfast._format.stored_record import open_record
from holdfast._transfer_record import TransferRecord

Ints: TypeAlias = tuple[int, ...]
Source: TypeAlias = Literal["holdfast", "torch", "torch.save", "safetensors"]
"""What wrote a checkpoint, and so its format."""


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
    item: StorageInfo | None


class ChunkSource(Protocol):
    """Knows the chunks of tensors, and makes records of them when somebody asks: a listing does not."""

    def chunks(self, entry: "TensorEntry") -> list[StoredChunk]: ...


class TensorEntry(NamedTuple):
    """A tensor.

    Attributes:
        key: Its flat key.
        dtype: The name of its dtype.
        shape: Its shape.
        nbytes: The bytes of its elements; None for a dtype that this version does not know.
        chunk_count: In how many chunks it is.
        is_stored: Whether the metadata names a place for each of them.
        row: The number of its first chunk among those of the source.
        box_at: Where the source has the offsets, and the lengths, of that chunk.
        source: What knows the chunks.
    """

    key: str
    dtype: str
    shape: Ints
    nbytes: int | None
    chunk_count: int
    is_stored: bool
    row: int
    box_at: int
    source: ChunkSource

    @property
    def chunks(self) -> list[StoredChunk]:
        """Its chunks, made anew at each call."""
        return self.source.chunks(self)


class ObjectEntry(NamedTuple):
    """A value that is not a tensor."""

    key: str
    item: StorageInfo | None


@dataclass(frozen=True)
class Inventory:
    """What one metadata file says of a checkpoint. What it does not say is None.

    Attributes:
        source: Which program wrote it.
        path: The metadata file, for messages.
        rank: For a rank's own part of a checkpoint (``__3.metadata``), that rank.
        nbytes: The size of the metadata file.
        format: The format's name and version.
        entries: Tensors and objects in the order of the checkpoint.
        files: The data files, each with the size that it must have; for torch's, at least.
        torch_readable: Whether there is a part that stock torch reads.
        software: What made it.
        created_ns: When, in nanoseconds since 1970.
        world_size: How many ranks took part.
        save_id: The name that the save gave itself.
        checkpoint_id: Where it was saved, in the words of the one who did.
        block_size: The unit of checksums.
        record: What the save did.
        user_metadata: What the caller of the save wanted to keep with the checkpoint.
    """

    source: Source
    path: str
    rank: int | None
    nbytes: int
    format: str
    entries: list[TensorEntry | ObjectEntry]
    files: dict[str, int]
    torch_readable: bool = False
    software: str | None = None
    created_ns: int | None = None
    world_size: int | None = None
    save_id: str | None = None
    checkpoint_id: str | None = None
    block_size: int | None = None
    _steps: Any = field(default=None, repr=False)
    _containers: Any = field(default=None, repr=False)
    record: TransferRecord | None = field(default=None, repr=False)
    user_metadata: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def tensors(self) -> list[TensorEntry]:
        """The tensors alone."""
        return [entry for entry in self.entries if isinstance(entry, TensorEntry)]

    @property
    def objects(self) -> list[ObjectEntry]:
        """The objects alone."""
        return [entry for entry in self.entries if isinstance(entry, ObjectEntry)]

    @property
    def item_count(self) -> int:
        """How many items there are."""
        return sum(1 if isinstance(entry, ObjectEntry) else entry.chunk_count for entry in self.entries)

    def items(self) -> Iterator[tuple[str, StoredChunk | None, StorageInfo | None]]:
        """Each item's key, its chunk (None for an object) and its place."""
        for entry in self.entries:
            if isinstance(entry, ObjectEntry):
                yield entry.key, None, entry.item
            else:
                for chunk in entry.chunks:
                    yield entry.key, chunk, chunk.item

    @cached_property
    def transforms(self) -> dict[tuple[str, ...], int]:
        """How many items went through each stack of transforms, in the order in which a reader undoes it."""
        stacks = (item.transform_descriptors for _, _, item in self.items() if item)
        return dict(Counter(tuple(stack) for stack in stacks if stack))

    @cached_property
    def paths(self) -> dict[str, tuple[Any, ...]]:
        """The way to each key through dicts (str, or TypedKey) and lists (int), as far as it is recorded.

        Raises:
            MetadataFormatError: A manifest has a path that cannot be.
        """
        if self.source == "holdfast":
            keys = [entry.key for entry in self.entries]
            return decode_paths(keys, self._steps, path=self.path) if self._steps else {}
        if self.source == "torch.save":
            return dict(self._steps or {})
        if not isinstance(self._steps, dict):
            return {}
        return {
            key: path
            for key, path in self._steps.items()
            if isinstance(path, tuple) and all(isinstance(step, str | int) for step in path)
        }

    @cached_property
    def containers(self) -> dict[tuple[Any, ...], Container]:
        """The containers of the nested state that the paths do not tell, such as empty ones.

        Raises:
            MetadataFormatError: A manifest has one that cannot be.
        """
        if self.source != "holdfast":
            return dict(self._containers or {})
        found = decode_containers(self._containers or [], path=self.path)
        return {where: Container(*what) for where, what in found.items()}


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
    ours = sections.manifest is not None
    if sections.manifest is not None:
        manifest = decode(sections.manifest, path=path)
        version, steps = ".".join(map(str, manifest.version)), manifest.paths
    else:
        # An eighth of the time that `holdfast ls` may take, and only checkpoints of torch need it.
        from holdfast._format.foreign_manifest import manifest_of_torch  # noqa: PLC0415
        from holdfast._format.torch_pickle import read_torch_metadata  # noqa: PLC0415

        stored = read_torch_metadata(sections.pickle, path=path)
        manifest = manifest_of_torch(stored, path=path)
        version, steps = stored.version or "", stored.planner_data
    return inventory_of(
        manifest,
        source="holdfast" if ours else "torch",
        path=path,
        rank=rank,
        nbytes=len(data),
        version=version,
        torch_readable=len(sections.pickle) > 0,
        steps=steps,
        containers=manifest.containers if ours else None,
    )


def inventory_of(
    manifest: Manifest,
    *,
    source: Source,
    path: str,
    nbytes: int,
    rank: int | None = None,
    version: str = "",
    torch_readable: bool = False,
    steps: Any = None,
    containers: Any = None,
) -> Inventory:
    """What a manifest says. Those of formats that are not ours lack facts which only ours has.

    Args:
        manifest: The manifest.
        source: What wrote the checkpoint.
        path: The file that the manifest was read or made from.
        nbytes: The size of that file.
        rank: The rank in its name, if there is one.
        version: The version of the format.
        torch_readable: Whether torch reads the checkpoint.
        steps: The way to each key, as the format has it.
        containers: What the ways do not tell, as the format has it.
    """
    ours = source == "holdfast"
    sizes = zip(manifest.file_names, ints(manifest.file_nbytes, "q"), strict=True)
    return Inventory(
        source=source,
        path=path,
        rank=rank,
        nbytes=nbytes,
        format=f"{source} {version}".strip(),
        torch_readable=torch_readable,
        software=manifest.software if ours else None,
        created_ns=manifest.created_ns if ours else None,
        world_size=manifest.world_size if ours else None,
        save_id=manifest.save_id or None,
        checkpoint_id=manifest.checkpoint_id if source != "torch.save" else None,
        block_size=manifest.block_size if ours else None,
        entries=list(_entries(manifest)),
        # A chunk that torch's metadata names no place for has no file.
        files={name: nbytes for name, nbytes in sizes if name},
        _steps=steps,
        _containers=containers,
        record=open_record(manifest.record, manifest.checkpoint_id or path) if manifest.record else None,
        user_metadata=decode_user_metadata(manifest.user_metadata, path=path),
    )


class _ManifestChunks:
    """The chunks that a manifest describes, each made from its row in the columns."""

    def __init__(self, manifest: Manifest) -> None:
        self._stored = StoredItems(manifest)
        self._offsets = ints(manifest.chunk_offsets, "q")
        self._lengths = ints(manifest.chunk_lengths, "q")

    def item(self, row: int) -> StorageInfo | None:
        """The item of a row; None if it has no place, as only torch's metadata may say."""
        return self._stored.record(row) if self._stored.nbytes[row] >= 0 else None

    @cached_property
    def _items(self) -> list[StorageInfo | None]:
        """All of them: who wants the chunks of one tensor mostly wants those of many."""
        return [item if item.length >= 0 else None for item in self._stored.records()]

    def chunks(self, entry: TensorEntry) -> list[StoredChunk]:
        ndim, found = len(entry.shape), []
        for number in range(entry.chunk_count):
            box = slice(entry.box_at + number * ndim, entry.box_at + (number + 1) * ndim)
            offsets, lengths = tuple(self._offsets[box]), tuple(self._lengths[box])
            found.append(StoredChunk(offsets, lengths, self._items[entry.row + number]))
        return found


def _entries(manifest: Manifest) -> Iterator[TensorEntry | ObjectEntry]:
    source, ndims = _ManifestChunks(manifest), iter(manifest.tensor_ndims)
    counts, properties = iter(ints(manifest.tensor_chunks, "I")), iter(ints(manifest.tensor_properties, "I"))
    shapes, dtypes = ints(manifest.tensor_shapes, "q").tolist(), [about[0] for about in manifest.properties]
    nbytes = manifest.item_column("nbytes")
    all_are_stored = min(nbytes, default=0) >= 0
    row = at = box_at = 0
    for key, kind in zip(manifest.keys, manifest.kinds, strict=True):
        if kind == OBJECT:
            yield ObjectEntry(key, source.item(row))
            row += 1
            continue
        count, ndim, dtype = next(counts), next(ndims), dtypes[next(properties)]
        shape = tuple(shapes[at : at + ndim])
        is_stored = all_are_stored or min(nbytes[row : row + count], default=0) >= 0
        yield TensorEntry(
            key, dtype, shape, tensor_nbytes(dtype, shape), count, is_stored, row, box_at, source
        )
        row, at, box_at = row + count, at + ndim, box_at + count * ndim


@lru_cache(maxsize=4096)  # models repeat their shapes layer by layer
def tensor_nbytes(dtype: str, shape: Ints) -> int | None:
    """The bytes of a tensor's elements; None for a dtype that this version does not know."""
    return DTYPES[dtype].itemsize * math.prod(shape) if dtype in DTYPES else None
