"""The tensors of safetensors files as the metadata of a checkpoint."""

from collections.abc import Mapping, Sequence

from holdfast._contents.safetensors_files import read_model_manifest
from holdfast._contents.safetensors_manifest import ModelChunk, manifest_of_chunks
from holdfast._format.manifest import Manifest
from holdfast._io.store import FileSource
from holdfast._plan.metadata_entries import MetadataEntries
from holdfast._storage.item_places import ItemPlaces, StorageData
from holdfast._storage.metadata_writing import VERSION
from holdfast.metadata import Metadata, StorageMeta


def read_model_metadata(store: FileSource, *, only: str | None = None) -> Metadata:
    """The metadata of the safetensors files of a folder, or of one of them; see ``read_model_manifest``."""
    return _metadata_of(read_model_manifest(store, only=only), store.url)


def metadata_of_chunks(url: str, files: Mapping[str, int], chunks: Sequence[ModelChunk]) -> Metadata:
    """The metadata of a checkpoint that consists of these chunks; see ``manifest_of_chunks``."""
    return _metadata_of(manifest_of_chunks(url, files, chunks), url)


def _metadata_of(manifest: Manifest, url: str) -> Metadata:
    entries = MetadataEntries(manifest, path=url)
    places = StorageData(ItemPlaces(manifest, entries.directory))
    return Metadata(entries, None, places, StorageMeta(url), VERSION)
