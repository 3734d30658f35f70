"""Owns what a conversion reads: a place of any format, seen as the metadata of a checkpoint and its bytes."""

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from holdfast._any_format import open_checkpoint
from holdfast._contents.opening import SafetensorsModel
from holdfast._format import metadata_file
from holdfast._format.item_table import StorageInfo
from holdfast._format.metadata_file import LARGEST_METADATA
from holdfast._format.names import METADATA
from holdfast._geometry import Box
from holdfast._io.places import local_path, open_file_place, open_place
from holdfast._io.progress import ProgressTracker
from holdfast._io.store import FileSource
from holdfast._storage.box_plan import BoxPlanner
from holdfast._storage.item_places import places_of
from holdfast._storage.metadata_reading import load_metadata
from holdfast._storage.reading import read_items
from holdfast._storage.safetensors_metadata import read_model_metadata
from holdfast._storage.torch_save_reading import read_torch_save_metadata
from holdfast._storage.torch_save_source import TorchSaveSource
from holdfast._torch_save_checkpoint import TorchSaveCheckpoint
from holdfast.errors import CheckpointNotFoundError, MetadataFormatError, UsageError
from holdfast.extension import ExtensionRegistry
from holdfast.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from holdfast.planner import LoadItemType, LoadPlan, ReadItem

Format: TypeAlias = Literal["holdfast", "torch", "torch_save", "safetensors"]
"""What a checkpoint can be: ours, torch's, one file of ``torch.save``, safetensors files."""

_BUDGET = 64 << 20


@dataclass
class Source:
    """A place that a conversion reads from: any part of any value, into new memory.

    Attributes:
        format: What it is.
        url: How the user would name it.
        store: Where its bytes are.
        metadata: What it holds.
    """

    format: Format
    url: str
    store: FileSource
    metadata: Metadata

    def tensor(self, key: str) -> TensorStorageMetadata | None:
        """The metadata of a tensor; None if the value is not a tensor."""
        entry = self.metadata.state_dict_metadata[key]
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def first_item(self, key: str) -> StorageInfo:
        """Where a value lies, or the first chunk of a tensor."""
        places = places_of(self.metadata)
        row = None if places is None else places.find(MetadataIndex(key))
        if places is None or row is None:
            raise MetadataFormatError(f"{self.url}: does not say where {key} is", key=key, path=self.url)
        return places.record(row)

    def read_boxes(self, wanted: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        """The elements of boxes of tensors, checked where there are checksums; small neighbours together."""
        planner = BoxPlanner(self.metadata, wanted)
        if planner.plan.items:
            self._read(planner.plan, planner)
        return planner.tensors

    def read_object(self, key: str) -> io.BytesIO:
        """A value that is not a tensor, as it is stored: the stream that ``decode_object`` takes."""
        index, planner, none = MetadataIndex(key), BoxPlanner(self.metadata), torch.Size([])
        self._read(LoadPlan([ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none)]), planner)
        assert planner.stream is not None
        return planner.stream

    def _read(self, plan: LoadPlan, planner: BoxPlanner) -> None:
        read_items(
            self.store,
            plan,
            planner,
            self.metadata,
            registry=ExtensionRegistry(),
            threads=min(len(plan.items), self.store.traits.requests_in_flight),
            budget=_BUDGET,
            verify=True,
            progress=ProgressTracker(),
        )


def open_source(
    place: str | os.PathLike[str],
    *,
    allow_pickle: bool = False,
    safe_globals: Sequence[Callable[..., Any] | type] = (),
) -> Source:
    """Open a checkpoint of any format; see ``open_checkpoint``.

    Raises:
        CheckpointNotFoundError: There is nothing of these.
        UsageError: Ranks have saved it each for itself.
        IntegrityError: It is damaged.
        UnsafeMetadataError: It needs something that is not allowed.
    """
    path, folder = os.fspath(place), local_path(place)
    if folder is not None and not os.path.exists(folder):
        raise CheckpointNotFoundError(f"{path}: there is no such file or folder", path=path)
    found = open_checkpoint(place, allow_pickle=allow_pickle, safe_globals=safe_globals)
    if isinstance(found, TorchSaveCheckpoint):
        return Source("torch_save", path, found.store, read_torch_save_metadata(found.source))
    if isinstance(found, SafetensorsModel):
        metadata = read_model_metadata(found.store, only=found.only_file)
        return Source("safetensors", path, found.store, metadata)
    if found.metadata_names != [(None, METADATA)]:
        raise UsageError(
            f"{path}: ranks have saved it each for itself (use_collectives=False), so that its parts are "
            "not one state. Load it on as many ranks, and save it without that option.",
            path=path,
        )
    return _open_metadata(found.store, path, allow_pickle=allow_pickle)


def open_target(
    place: str | os.PathLike[str],
    format: Format,
    *,
    file: tuple[FileSource, str] | None = None,
    safe_globals: Sequence[Callable[..., Any] | type] = (),
) -> Source:
    """Open a target that was just written, in a known format. No code of it is run.

    Args:
        place: The place.
        format: The format.
        file: For ``"torch_save"``: where the file is now.
        safe_globals: As for ``open_source``.
    """
    path = os.fspath(place)
    if format == "torch_save":
        store, name = file or open_file_place(place)
        found = TorchSaveSource(store, name, safe_globals=safe_globals)
        return Source(format, path, found, read_torch_save_metadata(found))
    store = open_place(place)
    if format == "safetensors":
        return Source(format, path, store, read_model_metadata(store))
    return _open_metadata(store, path, allow_pickle=False)


def _open_metadata(store: FileSource, path: str, *, allow_pickle: bool) -> Source:
    data = store.read(METADATA, max_bytes=LARGEST_METADATA)
    where = f"{store.url}/{METADATA}"
    is_ours = metadata_file.split(data, path=where).manifest is not None
    metadata = load_metadata(data, path=where, allow_pickle=allow_pickle)
    return Source("holdfast" if is_ours else "torch", path, store, metadata)
