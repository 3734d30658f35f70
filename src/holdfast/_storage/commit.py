"""Between ``Metadata`` and the bytes of ``.metadata``: what a commit writes and a reader makes of it."""

import functools
import itertools
import pickle
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from holdfast._format import metadata_file
from holdfast._format.manifest import (
    OBJECT,
    TENSOR,
    Manifest,
    column,
    concatenated,
    decode,
    encode,
)
from holdfast._format.paths import decode_containers, decode_paths, encode_containers, encode_paths
from holdfast._format.torch_pickle import read_plain_pickle, read_torch_metadata
from holdfast._format.torch_pickle_records import TorchMetadata, TorchProperties, TorchTensor
from holdfast._format.torch_pickle_writer import write_torch_metadata
from holdfast._io.blocks import BLOCK_SIZE
from holdfast._plan.structure import Container, Path, Structure
from holdfast._storage.record import StorageInfo
from holdfast._version import __version__
from holdfast.errors import MetadataFormatError
from holdfast.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

__all__ = ["dump_metadata", "load_metadata"]

VERSION = "1.0.0"
"""The version of torch's storage data that our pickles follow."""


def dump_metadata(metadata: Metadata, *, world_size: int, torch_compatible: bool) -> list[bytes]:
    """The pieces of the ``.metadata`` file of a checkpoint whose ``storage_data`` is complete."""
    rows = list(_rows(metadata))
    manifest = _manifest(metadata, rows, world_size=world_size)
    torch_part = _torch_pickle(metadata, rows) if torch_compatible else b""
    return metadata_file.join(torch_part, encode(manifest))


def _rows(metadata: Metadata) -> Iterator[tuple[MetadataIndex, StorageInfo]]:
    """Each item's name and place, in the order of the keys and of their chunks."""
    places: dict[MetadataIndex, StorageInfo] = metadata.storage_data
    by_key: dict[str, list[tuple[MetadataIndex, StorageInfo]]] = {}
    for index, place in places.items():
        by_key.setdefault(index.fqn, []).append((index, place))
    for key, entry in metadata.state_dict_metadata.items():
        found = by_key[key]
        if len(found) == 1 or not isinstance(entry, TensorStorageMetadata):
            yield found[0]
            continue
        for number, chunk in enumerate(entry.chunks):
            index = MetadataIndex(key, chunk.offsets, number)
            yield index, places[index]


def _word(value: object) -> str:
    return str(value).removeprefix("torch.")


@functools.lru_cache(maxsize=1024)
def _in_words(
    dtype: object, layout: object, requires_grad: bool, memory_format: object, pin_memory: bool
) -> TorchProperties:
    return TorchProperties(_word(dtype), _word(layout), requires_grad, _word(memory_format), pin_memory)


def _properties(properties: TensorProperties) -> TorchProperties:
    p = properties
    return _in_words(p.dtype, p.layout, p.requires_grad, p.memory_format, p.pin_memory)


class _Vocabulary(dict[Any, int]):
    """Numbers for values, in the order of their first use."""

    def __missing__(self, value: Any) -> int:
        self[value] = number = len(self)
        return number


def _manifest(
    metadata: Metadata, rows: list[tuple[MetadataIndex, StorageInfo]], *, world_size: int
) -> Manifest:
    entries = metadata.state_dict_metadata
    tensors = [entry for entry in entries.values() if isinstance(entry, TensorStorageMetadata)]
    chunks = [chunk for entry in tensors for chunk in entry.chunks]
    infos = [info for _, info in rows]
    files, properties, transforms = _Vocabulary(), _Vocabulary(), _Vocabulary()
    file_ends: dict[str, int] = {}
    for info in infos:
        end = info.offset + info.length
        if end > file_ends.get(info.relative_path, -1):
            file_ends[info.relative_path] = end
    item_files = [files[info.relative_path] for info in infos]
    tensor_properties = [properties[_properties(entry.properties)] for entry in tensors]
    item_transforms = [transforms[tuple(info.transform_descriptors or ())] for info in infos]
    meta = metadata.storage_meta or StorageMeta()
    paths, containers, extra = _split_planner_data(metadata)
    return Manifest(
        save_id=meta.save_id or "",
        created_ns=time.time_ns(),
        software=f"holdfast {__version__}, torch {torch.__version__}",
        world_size=world_size,
        block_size=BLOCK_SIZE,
        checkpoint_id=None if meta.checkpoint_id is None else str(meta.checkpoint_id),
        modules=list(meta.modules),
        file_names=list(files),
        file_nbytes=column([file_ends[name] for name in files], "q"),
        keys=list(entries),
        kinds=bytes(TENSOR if isinstance(e, TensorStorageMetadata) else OBJECT for e in entries.values()),
        properties=[tuple(p) for p in properties],
        tensor_properties=column(tensor_properties, "I"),
        tensor_ndims=bytes(len(entry.size) for entry in tensors),
        tensor_shapes=column(concatenated(entry.size for entry in tensors), "q"),
        tensor_chunks=column([len(entry.chunks) for entry in tensors], "I"),
        chunk_offsets=column(concatenated(chunk.offsets for chunk in chunks), "q"),
        chunk_lengths=column(concatenated(chunk.sizes for chunk in chunks), "q"),
        transforms=[list(stack) for stack in transforms] or [[]],
        item_files=column(item_files, "I"),
        item_offsets=column([info.offset for info in infos], "q"),
        item_nbytes=column([info.length for info in infos], "q"),
        item_payload_offsets=column([info.payload_offset for info in infos], "q"),
        item_payload_nbytes=column([info.payload_nbytes for info in infos], "q"),
        item_raw_nbytes=column([info.raw_nbytes for info in infos], "q"),
        item_transforms=column(item_transforms, "I"),
        item_blocks=column([len(info.checksums) // 4 for info in infos], "I"),
        item_wrap_checksums=column([info.wrap_checksum for info in infos], "I"),
        checksums=b"".join([info.checksums for info in infos]),
        paths=encode_paths(list(entries), paths),
        containers=encode_containers(containers),
        planner_pickle=extra,
    )


def _split_planner_data(
    metadata: Metadata,
) -> tuple[dict[str, Path], dict[Path, Container], bytes | None]:
    """Planner data as paths of keys and containers, and as a pickle whatever is not that."""
    data = metadata.planner_data
    if data is None:
        return {}, {}, None
    if not isinstance(data, dict):
        return {}, {}, pickle.dumps(data, protocol=4)
    known = metadata.state_dict_metadata
    paths = {key: path for key, path in data.items() if key in known and isinstance(path, tuple)}
    rest = {key: value for key, value in data.items() if key not in paths}
    containers = dict(getattr(data, "containers", {}))
    return paths, containers, pickle.dumps(rest, protocol=4)


def _torch_pickle(metadata: Metadata, rows: Iterable[tuple[MetadataIndex, StorageInfo]]) -> bytes:
    meta = metadata.storage_meta or StorageMeta()
    # Plain tuples in the place of the writer's records, which are tuples too: one call less for each.
    entries: Iterator[tuple[str, Any]] = (
        (
            key,
            (
                _properties(entry.properties),
                entry.size,
                [(chunk.offsets, chunk.sizes) for chunk in entry.chunks],
            )
            if isinstance(entry, TensorStorageMetadata)
            else None,
        )
        for key, entry in metadata.state_dict_metadata.items()
    )
    storage = (
        (
            index.fqn,
            index.offset,
            index.index,
            info.relative_path,
            info.offset,
            info.length,
            tuple(info.transform_descriptors) if info.transform_descriptors else None,
        )
        for index, info in rows
    )
    return write_torch_metadata(
        entries=entries,
        storage=storage,
        planner_data=metadata.planner_data,
        checkpoint_id=None if meta.checkpoint_id is None else str(meta.checkpoint_id),
        save_id=meta.save_id,
        modules=[*meta.modules, metadata_file.MARK],
        version=VERSION,
    )


def load_metadata(data: bytes, *, path: str, allow_pickle: bool = False) -> tuple[Metadata, Manifest | None]:
    """Make the metadata of a checkpoint from its ``.metadata`` file; the manifest too, if we wrote it.

    Raises:
        MetadataFormatError: The file is damaged.
        UnsafeMetadataError: It asks for code to be run.
    """
    sections = metadata_file.split(data, path=path)
    if sections.manifest is None:
        return _from_torch(read_torch_metadata(sections.pickle, path=path), path), None
    manifest = decode(sections.manifest, path=path)
    return _from_manifest(manifest, path, allow_pickle=allow_pickle), manifest


def _from_manifest(manifest: Manifest, path: str, *, allow_pickle: bool) -> Metadata:
    described = [_tensor_properties(*properties, path=path) for properties in manifest.properties]
    # Objects have nothing to tell; filling all keys with one keeps the keys' order.
    entries: dict[str, STORAGE_TYPES] = dict.fromkeys(manifest.keys, BytesStorageMetadata())
    places: dict[MetadataIndex, StorageInfo] = {}
    size = torch.Size
    rows = map(StorageInfo, *manifest.item_columns(), itertools.repeat(manifest.block_size))
    for key, properties, shape, chunks in manifest.entries():
        if properties is None:
            places[MetadataIndex(key)] = next(rows)
            continue
        boxes = []
        for number, (offsets, lengths) in enumerate(chunks):
            at = size(offsets)
            boxes.append(ChunkStorageMetadata(at, size(lengths)))
            places[MetadataIndex(key, at, number)] = next(rows)
        entries[key] = TensorStorageMetadata(described[properties], size(shape), boxes)
    meta = StorageMeta(manifest.checkpoint_id, manifest.save_id or None, None, list(manifest.modules))
    planner_data = _planner_data(manifest, path, allow_pickle=allow_pickle)
    return Metadata(entries, planner_data, places, meta, VERSION)


def _planner_data(manifest: Manifest, path: str, *, allow_pickle: bool) -> Any:
    extra: Any = None
    if manifest.planner_pickle is not None:
        extra = (
            pickle.loads(manifest.planner_pickle)
            if allow_pickle
            else read_plain_pickle(manifest.planner_pickle, path=path)
        )
    if not manifest.paths and not manifest.containers:
        return extra
    structure = Structure(decode_paths(manifest.keys, manifest.paths, path=path) if manifest.paths else {})
    structure.containers = {
        where: Container(*what) for where, what in decode_containers(manifest.containers, path=path).items()
    }
    if isinstance(extra, dict):
        structure.update(extra)
    return structure


_MEMORY_FORMATS = ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")


def _tensor_properties(
    dtype: str, layout: str, requires_grad: bool, memory_format: str, pin_memory: bool, *, path: str
) -> TensorProperties:
    made = getattr(torch, dtype, None)
    if not isinstance(made, torch.dtype):
        raise MetadataFormatError(
            f"{path} has a tensor of the dtype {dtype!r}, which torch {torch.__version__} does not have",
            path=path,
            found=dtype,
        )
    made_layout = getattr(torch, layout, torch.strided)
    return TensorProperties(
        made,
        made_layout if isinstance(made_layout, torch.layout) else torch.strided,
        requires_grad,
        getattr(torch, memory_format) if memory_format in _MEMORY_FORMATS else torch.contiguous_format,
        pin_memory,
    )


def _from_torch(stored: TorchMetadata, path: str) -> Metadata:
    if stored.storage_meta is not None and metadata_file.MARK in stored.storage_meta.modules:
        raise MetadataFormatError(
            f"{path} is damaged: it was written by holdfast and has lost its end. Restore the file, or load "
            "another checkpoint.",
            path=path,
        )
    described: dict[TorchProperties, TensorProperties] = {}
    entries: dict[str, STORAGE_TYPES] = {}
    for key, entry in stored.entries.items():
        if not isinstance(entry, TorchTensor):
            entries[key] = BytesStorageMetadata()
            continue
        properties = described.get(entry.properties)
        if properties is None:
            properties = described[entry.properties] = _tensor_properties(*entry.properties, path=path)
        boxes = [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in entry.chunks]
        entries[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), boxes)
    # torch's writer records a stack of transforms in the order of writing; a reader undoes it backwards.
    places = {
        MetadataIndex(key, offsets): StorageInfo(
            place.path, place.offset, place.nbytes, tuple(reversed(place.descriptors)) or None
        )
        for (key, offsets), place in stored.storage.items()
    }
    meta = stored.storage_meta
    return Metadata(
        entries,
        stored.planner_data,
        places,
        StorageMeta()
        if meta is None
        else StorageMeta(meta.checkpoint_id, meta.save_id, None, list(meta.modules)),
        stored.version,
    )


def file_names(metadata: Metadata) -> set[str]:
    """The names of the files that a checkpoint is made of."""
    return {info.relative_path for info in metadata.storage_data.values()}
