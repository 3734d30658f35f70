"""Owns reading what a torch.save file holds: the file as the metadata of a checkpoint.

The metadata has the form of our own checkpoints, so that whatever reads those reads these.
"""

from typing import Any

from holdfast._format.description import OBJECT, TENSOR, column, concatenated, numbered
from holdfast._format.manifest import Manifest
from holdfast._io.blocks import BLOCK_SIZE
from holdfast._plan.metadata_entries import MetadataEntries
from holdfast._storage.item_places import ItemPlaces, StorageData
from holdfast._storage.metadata_writing import VERSION
from holdfast._storage.torch_save_contents import SavedItem
from holdfast._storage.torch_save_source import TorchSaveSource
from holdfast.metadata import Metadata, StorageMeta


def read_torch_save_metadata(source: TorchSaveSource) -> Metadata:
    """The metadata of the file of a source.

    Raises:
        CheckpointNotFoundError: There is no such file.
        MetadataFormatError: It is not a file that ``torch.save`` writes, or does not hold a dict.
        IntegrityError: It is damaged.
        UnsafeMetadataError: What it holds needs something that is not allowed.
    """
    contents = source.contents
    items = contents.items
    tensors = [item for item in items.values() if item.tensor is not None]
    shapes = [item.tensor.shape for item in tensors if item.tensor is not None]
    properties, used = numbered(
        (
            str(item.tensor.dtype).removeprefix("torch."),
            "strided",
            item.requires_grad,
            "contiguous_format",
            False,
        )
        for item in tensors
        if item.tensor is not None
    )
    manifest = Manifest(
        save_id="",
        created_ns=0,
        software="torch.save",
        world_size=1,
        block_size=BLOCK_SIZE,
        checkpoint_id=source.path,
        file_names=[source.name, source.others_name],
        file_nbytes=column([contents.nbytes, contents.others_nbytes], "q"),
        transforms=[[]],
        checksums=b"".join(map(_checksums, items.values())),
        paths=[],
        containers=[],
        keys=list(items),
        kinds=bytes(OBJECT if item.tensor is None else TENSOR for item in items.values()),
        properties=properties,
        tensor_properties=column(used, "I"),
        tensor_ndims=bytes(map(len, shapes)),
        tensor_shapes=column(concatenated(shapes), "q"),
        tensor_chunks=column([1] * len(shapes), "I"),
        chunk_offsets=column([0] * sum(map(len, shapes)), "q"),
        chunk_lengths=column(concatenated(shapes), "q"),
        **_item_columns(list(items.values())),
    )
    entries = MetadataEntries(manifest, path=source.path)
    places = StorageData(ItemPlaces(manifest, entries.directory))
    return Metadata(entries, contents.structure, places, StorageMeta(source.path), VERSION)


def _checksums(item: SavedItem) -> bytes:
    """The checksum of its one block, if it has no more: the file has one checksum for each storage."""
    is_known = item.crc32 is not None and 0 < item.nbytes <= BLOCK_SIZE
    return item.crc32.to_bytes(4, "little") if is_known and item.crc32 is not None else b""


def _item_columns(items: list[SavedItem]) -> dict[str, Any]:
    zeros = [0] * len(items)
    sizes = [item.nbytes for item in items]
    return {
        "item_files": column([0 if item.in_file else 1 for item in items], "I"),
        "item_offsets": column([item.offset for item in items], "q"),
        "item_nbytes": column(sizes, "q"),
        "item_transforms": column(zeros, "I"),
        "item_payload_offsets": column(zeros, "q"),
        # Values that are not tensors are read with their containers.
        "item_payload_nbytes": column([-1 if item.tensor is None else item.nbytes for item in items], "q"),
        "item_raw_nbytes": column(sizes, "q"),
        "item_blocks": column([len(_checksums(item)) // 4 for item in items], "I"),
        "item_wrap_checksums": column(zeros, "I"),
    }
