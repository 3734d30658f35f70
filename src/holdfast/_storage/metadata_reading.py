"""From the bytes of ``.metadata``, ours or torch's, to what readers and planners see of it."""

import pickle
from typing import Any

from holdfast._format import metadata_file
from holdfast._format.description import OBJECT, TENSOR, column, concatenated
from holdfast._format.manifest import Manifest, decode
from holdfast._format.paths import decode_containers, decode_paths
from holdfast._format.torch_pickle import read_plain_pickle, read_torch_metadata
from holdfast._format.torch_pickle_records import TorchMetadata, TorchStorage, TorchTensor
from holdfast._io.blocks import BLOCK_SIZE
from holdfast._plan.flatten import Container, Structure
from holdfast._plan.metadata_entries import MetadataEntries
from holdfast._storage.manifest_rows import rows_are_sound
from holdfast._storage.metadata_writing import VERSION
from holdfast._storage.shelf import Places, Shelf
from holdfast.errors import MetadataFormatError
from holdfast.metadata import Metadata, StorageMeta

__all__ = ["load_metadata"]


def load_metadata(data: bytes | bytearray, *, path: str, allow_pickle: bool = False) -> Metadata:
    """Make the metadata of a checkpoint from its ``.metadata`` file.

    Raises:
        MetadataFormatError: The file is damaged.
        UnsafeMetadataError: It asks for code to be run.
    """
    sections = metadata_file.split(data, path=path)
    if sections.manifest is None:
        return _from_torch(read_torch_metadata(sections.pickle, path=path), path)
    manifest = decode(sections.manifest, path=path, rows_are_sound=rows_are_sound)
    meta = StorageMeta(manifest.checkpoint_id, manifest.save_id or None, None, list(manifest.modules))
    planner_data = _planner_data(manifest, path, allow_pickle=allow_pickle)
    return _metadata(manifest, path, planner_data, meta, VERSION)


def _metadata(
    manifest: Manifest, path: str, planner_data: Any, meta: StorageMeta, version: str | None
) -> Metadata:
    entries = MetadataEntries(manifest, path=path)
    places = Places(Shelf(manifest, entries.directory))
    return Metadata(entries, planner_data, places, meta, version)


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


def _from_torch(stored: TorchMetadata, path: str) -> Metadata:
    if stored.storage_meta is not None and metadata_file.MARK in stored.storage_meta.modules:
        raise MetadataFormatError(
            f"{path} is damaged: it was written by holdfast and has lost its end. Restore the file, or load "
            "another checkpoint.",
            path=path,
        )
    meta = stored.storage_meta
    return _metadata(
        _manifest_of_torch(stored),
        path,
        stored.planner_data,
        StorageMeta()
        if meta is None
        else StorageMeta(meta.checkpoint_id, meta.save_id, None, list(meta.modules)),
        stored.version,
    )


_NO_PLACE = TorchStorage("", 0, -1)


def _manifest_of_torch(stored: TorchMetadata) -> Manifest:
    """What a checkpoint of torch's holds, as if it were ours, without checksums and payloads."""
    entries = stored.entries
    tensors = [entry for entry in entries.values() if isinstance(entry, TorchTensor)]
    places = [
        stored.storage.get((key, offsets), _NO_PLACE)
        for key, entry in entries.items()
        for offsets in ([o for o, _ in entry.chunks] if isinstance(entry, TorchTensor) else [None])
    ]
    # torch's writer records a stack of transforms in the order of writing; a reader undoes it backwards.
    stacks = {(): 0} | {tuple(reversed(place.descriptors)): 0 for place in places if place.descriptors}
    stacks = {stack: number for number, stack in enumerate(stacks)}
    files = {name: number for number, name in enumerate(dict.fromkeys(place.path for place in places))}
    properties = {p: n for n, p in enumerate(dict.fromkeys(entry.properties for entry in tensors))}
    chunks = [chunk for entry in tensors for chunk in entry.chunks]
    count = len(places)
    unknown = column([-1] * count, "q")
    return Manifest(
        save_id="",
        created_ns=0,
        software="torch",
        world_size=0,
        block_size=BLOCK_SIZE,
        file_names=list(files),
        file_nbytes=column([0] * len(files), "q"),
        keys=list(entries),
        kinds=bytes(TENSOR if isinstance(entry, TorchTensor) else OBJECT for entry in entries.values()),
        properties=list(properties),
        tensor_properties=column([properties[entry.properties] for entry in tensors], "I"),
        tensor_ndims=bytes(len(entry.shape) for entry in tensors),
        tensor_shapes=column(concatenated(entry.shape for entry in tensors), "q"),
        tensor_chunks=column([len(entry.chunks) for entry in tensors], "I"),
        chunk_offsets=column(concatenated(offsets for offsets, _ in chunks), "q"),
        chunk_lengths=column(concatenated(lengths for _, lengths in chunks), "q"),
        transforms=[list(stack) for stack in stacks],
        item_files=column([files[place.path] for place in places], "I"),
        item_offsets=column([place.offset for place in places], "q"),
        item_nbytes=column([place.nbytes for place in places], "q"),
        item_payload_offsets=column([0] * count, "q"),
        item_payload_nbytes=unknown,
        item_raw_nbytes=unknown,
        item_transforms=column([stacks[tuple(reversed(p.descriptors))] for p in places], "I"),
        item_blocks=column([0] * count, "I"),
        item_wrap_checksums=column([0] * count, "I"),
        checksums=b"",
        paths=[],
        containers=[],
    )
