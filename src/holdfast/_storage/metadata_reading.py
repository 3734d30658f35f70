"""From the bytes of ``.metadata``, ours or torch's, to what readers and planners see of it."""

import pickle
from typing import Any

from holdfast._contents.nested_state import Container
from holdfast._format import metadata_file
from holdfast._format.foreign_manifest import manifest_of_torch
from holdfast._format.manifest import Manifest, decode, decode_user_metadata
from holdfast._format.paths import decode_containers, decode_paths
from holdfast._format.stored_record import open_record
from holdfast._format.torch_pickle import read_plain_pickle, read_torch_metadata
from holdfast._plan.flatten import Structure
from holdfast._plan.metadata_entries import MetadataEntries
from holdfast._storage.item_places import ItemPlaces, StorageData
from holdfast._storage.metadata_writing import VERSION
from holdfast.metadata import Metadata, StorageMeta


def load_metadata(data: bytes | bytearray, *, path: str, allow_pickle: bool = False) -> Metadata:
    """Make the metadata of a checkpoint from its ``.metadata`` file.

    Raises:
        MetadataFormatError: The file is damaged.
        UnsafeMetadataError: It asks for code to be run.
    """
    sections = metadata_file.split(data, path=path)
    if sections.manifest is None:
        stored = read_torch_metadata(sections.pickle, path=path)
        manifest, version = manifest_of_torch(stored, path=path), stored.version
        planner_data = stored.planner_data
    else:
        manifest, version = decode(sections.manifest, path=path), VERSION
        planner_data = _planner_data(manifest, path, allow_pickle=allow_pickle)
    metadata = metadata_of_manifest(manifest, path, planner_data=planner_data)
    metadata.version = version
    if manifest.record is not None:
        metadata.record = open_record(manifest.record, manifest.checkpoint_id or "")
    if manifest.user_metadata:
        metadata.user_metadata = decode_user_metadata(manifest.user_metadata, path=path)
    return metadata


def metadata_of_manifest(
    manifest: Manifest, path: str, *, planner_data: Any = None, kind: type[ItemPlaces] = ItemPlaces
) -> Metadata:
    """The metadata of a checkpoint that a manifest describes; ``path`` is what it was read from."""
    entries = MetadataEntries(manifest, path=path)
    places = StorageData(kind(manifest, entries.directory))
    meta = StorageMeta(manifest.checkpoint_id, manifest.save_id or None, None, list(manifest.modules))
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
