"""Makes manifests of what others wrote, so that files of every format are read alike.

Entries are described in the terms of torch's metadata. Facts of items that a format does not record have the
defaults of the item table.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast._format import metadata_file
from holdfast._format.description import OBJECT, TENSOR, column, concatenated, ints, numbered
from holdfast._format.item_table import COLUMNS, default_number
from holdfast._format.manifest import Manifest, file_sizes_in
from holdfast._format.torch_pickle import read_torch_metadata
from holdfast._format.torch_pickle_records import TorchMetadata, TorchObject, TorchStorage, TorchTensor
from holdfast.errors import MetadataFormatError

_NO_PLACE = TorchStorage("", 0, -1)
_BLOCK_SIZE = 1 << 20


def foreign_manifest(
    entries: Mapping[str, TorchTensor | TorchObject],
    columns: Mapping[str, Sequence[int]],
    files: Mapping[str, int],
    **facts: Any,
) -> Manifest:
    """The manifest of a checkpoint that another program wrote.

    Args:
        entries: Tensors and objects in their order, by key.
        columns: What is known of their items, as the item table names its columns: a number for each chunk,
            and for each object.
        files: The data files, which numbers of the column ``files`` refer to, with their sizes.
        facts: Fields of the manifest that are not the usual ones.
    """
    tensors = [entry for entry in entries.values() if isinstance(entry, TorchTensor)]
    properties, tensor_properties = numbered(entry.properties for entry in tensors)
    chunks = [chunk for entry in tensors for chunk in entry.chunks]
    count = len(chunks) + len(entries) - len(tensors)
    items: dict[str, Any] = {
        declared.in_manifest: column(
            columns.get(declared.name) or [default_number(field)] * count, declared.typecode
        )
        for field, declared in COLUMNS.items()
    }
    usual: dict[str, Any] = {
        "save_id": "",
        "created_ns": 0,
        "world_size": 0,
        "block_size": _BLOCK_SIZE,
        "transforms": [[]],
        "checksums": b"",
    }
    return Manifest(
        file_names=list(files),
        file_nbytes=column(files.values(), "q"),
        keys=list(entries),
        kinds=bytes(TENSOR if isinstance(entry, TorchTensor) else OBJECT for entry in entries.values()),
        properties=list(properties),
        tensor_properties=column(tensor_properties, "I"),
        tensor_ndims=bytes(len(entry.shape) for entry in tensors),
        tensor_shapes=column(concatenated(entry.shape for entry in tensors), "q"),
        tensor_chunks=column([len(entry.chunks) for entry in tensors], "I"),
        chunk_offsets=column(concatenated(offsets for offsets, _ in chunks), "q"),
        chunk_lengths=column(concatenated(lengths for _, lengths in chunks), "q"),
        paths=[],
        containers=[],
        **items,
        **{**usual, **facts},
    )


def data_files_in(data: bytes | bytearray, *, path: str) -> dict[str, int]:
    """The data files that a metadata file names, each with the bytes that it must have at least.

    Of a file of ours nothing else is looked at.

    Raises:
        IntegrityError: It is damaged, of a newer version, or unsafe.
    """
    sections = metadata_file.split(data, path=path)
    if sections.manifest is not None:
        return file_sizes_in(sections.manifest, path=path)
    manifest = manifest_of_torch(read_torch_metadata(sections.pickle, path=path), path=path)
    sizes = zip(manifest.file_names, ints(manifest.file_nbytes, "q"), strict=True)
    # A chunk that torch's metadata names no place for has no file.
    return {name: nbytes for name, nbytes in sizes if name}


def manifest_of_torch(stored: TorchMetadata, *, path: str) -> Manifest:
    """What a checkpoint of torch's holds, as if it were ours.

    A chunk that the metadata names no place for has an item of -1 bytes. Files are as long as their items
    need.

    Raises:
        MetadataFormatError: The file at ``path`` was written by holdfast and has lost its manifest.
    """
    meta = stored.storage_meta
    if meta is not None and metadata_file.MARK in meta.modules:
        raise MetadataFormatError(
            f"{path} is damaged: it was written by holdfast and has lost its end. Restore the file, or load "
            "another checkpoint.",
            path=path,
        )
    places = [
        stored.storage.get((key, offsets), _NO_PLACE)
        for key, entry in stored.entries.items()
        for offsets in ([o for o, _ in entry.chunks] if isinstance(entry, TorchTensor) else [None])
    ]
    # torch's writer records a stack of transforms in the order of writing; a reader undoes it backwards.
    stacks, item_stacks = numbered(tuple(reversed(place.descriptors)) for place in places)
    names, item_files = numbered(place.path for place in places)
    files = dict.fromkeys(names, 0)
    for place in places:
        files[place.path] = max(files[place.path], place.offset + place.nbytes)
    columns = {
        "files": item_files,
        "offsets": [place.offset for place in places],
        "nbytes": [place.nbytes for place in places],
        "transforms": item_stacks,
    }
    return foreign_manifest(
        stored.entries,
        columns,
        files,
        software="torch",
        save_id=(meta and meta.save_id) or "",
        checkpoint_id=meta and meta.checkpoint_id,
        modules=list(meta.modules) if meta else [],
        transforms=[list(stack) for stack in stacks],
    )
