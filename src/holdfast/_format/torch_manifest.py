"""Makes a manifest of the metadata of a checkpoint that torch wrote, so that both kinds are read alike."""

from typing import Any

from holdfast._format import metadata_file
from holdfast._format.description import OBJECT, TENSOR, column, concatenated, numbered
from holdfast._format.item_table import COLUMNS, default_number
from holdfast._format.manifest import Manifest
from holdfast._format.torch_pickle_records import TorchMetadata, TorchStorage, TorchTensor
from holdfast.errors import MetadataFormatError

_NO_PLACE = TorchStorage("", 0, -1)
_BLOCK_SIZE = 1 << 20


def manifest_of_torch(stored: TorchMetadata, *, path: str) -> Manifest:
    """What a checkpoint of torch's holds, as if it were ours.

    Fields of items that torch does not record have their defaults. A chunk that the metadata names no place
    for has an item of -1 bytes. Files are as long as their items need.

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
    entries = stored.entries
    tensors = [entry for entry in entries.values() if isinstance(entry, TorchTensor)]
    places = [
        stored.storage.get((key, offsets), _NO_PLACE)
        for key, entry in entries.items()
        for offsets in ([o for o, _ in entry.chunks] if isinstance(entry, TorchTensor) else [None])
    ]
    # torch's writer records a stack of transforms in the order of writing; a reader undoes it backwards.
    stacks, item_stacks = numbered(tuple(reversed(place.descriptors)) for place in places)
    files, item_files = numbered(place.path for place in places)
    properties, tensor_properties = numbered(entry.properties for entry in tensors)
    ends = dict.fromkeys(files, 0)
    for place in places:
        ends[place.path] = max(ends[place.path], place.offset + place.nbytes)
    known = {
        "files": item_files,
        "offsets": [place.offset for place in places],
        "nbytes": [place.nbytes for place in places],
        "transforms": item_stacks,
    }
    items: dict[str, Any] = {
        of_field.in_manifest: column(
            known.get(of_field.name) or [default_number(field)] * len(places), of_field.typecode
        )
        for field, of_field in COLUMNS.items()
    }
    chunks = [chunk for entry in tensors for chunk in entry.chunks]
    return Manifest(
        save_id=(meta and meta.save_id) or "",
        created_ns=0,
        software="torch",
        world_size=0,
        block_size=_BLOCK_SIZE,
        checkpoint_id=meta and meta.checkpoint_id,
        modules=list(meta.modules) if meta else [],
        file_names=files,
        file_nbytes=column(ends.values(), "q"),
        keys=list(entries),
        kinds=bytes(TENSOR if isinstance(entry, TorchTensor) else OBJECT for entry in entries.values()),
        properties=list(properties),
        tensor_properties=column(tensor_properties, "I"),
        tensor_ndims=bytes(len(entry.shape) for entry in tensors),
        tensor_shapes=column(concatenated(entry.shape for entry in tensors), "q"),
        tensor_chunks=column([len(entry.chunks) for entry in tensors], "I"),
        chunk_offsets=column(concatenated(offsets for offsets, _ in chunks), "q"),
        chunk_lengths=column(concatenated(lengths for _, lengths in chunks), "q"),
        transforms=[list(stack) for stack in stacks],
        checksums=b"",
        paths=[],
        containers=[],
        **items,
    )
