"""Owns reading what a torch.save file holds: the file as the metadata of a checkpoint.

The metadata has the form of our own checkpoints, so that whatever reads those reads these.
"""

from holdfast._format.foreign_manifest import foreign_manifest
from holdfast._format.manifest import Manifest
from holdfast._format.torch_pickle_records import TorchObject, TorchProperties, TorchTensor
from holdfast._io.blocks import BLOCK_SIZE
from holdfast._storage.metadata_reading import metadata_of_manifest
from holdfast._storage.torch_save_contents import SavedItem
from holdfast._storage.torch_save_source import TorchSaveSource
from holdfast.metadata import Metadata


def read_torch_save_metadata(source: TorchSaveSource) -> Metadata:
    """The metadata of the file of a source.

    Raises:
        CheckpointNotFoundError: There is no such file.
        MetadataFormatError: It is not a file that ``torch.save`` writes, or does not hold a dict.
        IntegrityError: It is damaged.
        UnsafeMetadataError: What it holds needs something that is not allowed.
    """
    return metadata_of_manifest(
        torch_save_manifest(source), source.path, planner_data=source.contents.structure
    )


def torch_save_manifest(source: TorchSaveSource) -> Manifest:
    """What the file of a source holds, without its structure; raises what the metadata does."""
    contents = source.contents
    items = list(contents.items.values())
    sizes = [item.nbytes for item in items]
    columns = {
        "files": [0 if item.in_file else 1 for item in items],
        "offsets": [item.offset for item in items],
        "nbytes": sizes,
        # Values that are not tensors are read with their containers.
        "payload_nbytes": [-1 if item.tensor is None else item.nbytes for item in items],
        "raw_nbytes": sizes,
        "blocks": [len(_checksums(item)) // 4 for item in items],
    }
    return foreign_manifest(
        {key: _entry(item) for key, item in contents.items.items()},
        columns,
        {source.name: contents.nbytes, source.others_name: contents.others_nbytes},
        software="torch.save",
        world_size=1,
        checkpoint_id=source.path,
        checksums=b"".join(map(_checksums, items)),
    )


def _entry(item: SavedItem) -> TorchTensor | TorchObject:
    if item.tensor is None:
        return TorchObject()
    dtype, shape = str(item.tensor.dtype).removeprefix("torch."), tuple(item.tensor.shape)
    properties = TorchProperties(dtype, requires_grad=item.requires_grad)
    return TorchTensor(properties, shape, [((0,) * len(shape), shape)])


def _checksums(item: SavedItem) -> bytes:
    """The checksum of its one block, if it has no more: the file has one checksum for each storage."""
    is_known = item.crc32 is not None and 0 < item.nbytes <= BLOCK_SIZE
    return item.crc32.to_bytes(4, "little") if is_known and item.crc32 is not None else b""
