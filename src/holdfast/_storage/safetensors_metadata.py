"""The tensors of safetensors files as the metadata of a checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast._contents.safetensors_files import read_model_manifest
from holdfast._contents.safetensors_manifest import ModelChunk, manifest_of_chunks
from holdfast._hf_utils import _HFStorageInfo
from holdfast._io.store import FileSource
from holdfast._storage.item_places import ItemPlaces
from holdfast._storage.metadata_reading import metadata_of_manifest
from holdfast.metadata import Metadata, MetadataIndex


class ModelPlaces(ItemPlaces):
    """The tensors of a model. As records they are those that torch's reader makes."""

    def __reduce__(self) -> Any:
        return ModelPlaces, (self.manifest, self.directory)

    def items(self) -> Iterator[tuple[MetadataIndex, Any]]:
        """All names and records."""
        folder, directory = self.manifest.checkpoint_id, self.directory
        for index, place in super().items():
            number = directory.numbers[index.fqn]
            (dtype, *_), chunk = self.manifest.properties[directory.properties[number]], index.index or 0
            shape = torch.Size(self.chunk_shape(index.fqn, directory.row[number] + chunk))
            file = f"{folder}/{place.relative_path}"
            yield index, _HFStorageInfo(file, shape, getattr(torch, dtype), place)


def read_model_metadata(store: FileSource, *, only: str | None = None) -> Metadata:
    """The metadata of the safetensors files of a folder, or of one of them; see ``read_model_manifest``."""
    return metadata_of_manifest(read_model_manifest(store, only=only), store.url, kind=ModelPlaces)


def metadata_of_chunks(url: str, files: Mapping[str, int], chunks: Sequence[ModelChunk]) -> Metadata:
    """The metadata of a checkpoint that consists of these chunks; see ``manifest_of_chunks``."""
    return metadata_of_manifest(manifest_of_chunks(url, files, chunks), url)
