"""Owns the planner of a save that copies: what it saves is read from another place, piece by piece."""

import dataclasses
import io
from collections.abc import Iterator
from typing import Any

import torch

from holdfast._conversion.entry_stream import EntryStream
from holdfast._conversion.selection import Entry
from holdfast._geometry import Box, volume
from holdfast._objects.object_streams import StreamedPayload
from holdfast._plan.global_plan import describe
from holdfast._storage.small_items import SMALL, frame_of
from holdfast._tensors.host import memory_of
from holdfast.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from holdfast.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType


class CopyPlanner(SavePlanner):
    """Saves what a source holds, with its chunks; for one process.

    Args:
        stream: Gives it.
        in_pieces: Whether the writer takes chunks of a few MiB only, and joins them itself. If not, it gets
            each chunk of the source as a stream.
    """

    def __init__(self, stream: EntryStream, *, in_pieces: bool) -> None:
        self._stream = stream
        self._in_pieces = in_pieces

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing: there is no state."""

    def create_local_plan(self) -> SavePlan:
        """An item for each chunk or piece of a tensor, and each other value."""
        entries = self._stream.selection.entries.values()
        items = [item for entry in entries for item in self._items(entry)]
        return SavePlan(items, planner_data=self._stream.selection.structure)

    def _items(self, entry: Entry) -> Iterator[WriteItem]:
        if entry.dtype is None:
            yield WriteItem(MetadataIndex(entry.name), WriteItemType.BYTE_IO)
            return
        properties = TensorProperties(entry.dtype, requires_grad=entry.requires_grad)
        for number, box in enumerate(self._boxes(entry)):
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))
            data = TensorWriteData(chunk, properties, torch.Size(entry.shape))
            kind = WriteItemType.TENSOR if box.lengths == entry.shape else WriteItemType.SHARD
            yield WriteItem(MetadataIndex(entry.name, chunk.offsets, number), kind, tensor_data=data)

    def _boxes(self, entry: Entry) -> Iterator[Box]:
        for box in self._stream.boxes(entry):
            if self._in_pieces:
                yield from self._stream.parts(entry, box)
            else:
                yield box

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plan as it is, with the structure of the state."""
        plans, metadata = describe(all_plans)
        return plans, dataclasses.replace(metadata, planner_data=all_plans[0].planner_data)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """A small piece or a value, read now; or a stream of a chunk, which is read as it is written."""
        entry = self._stream.selection.entries[write_item.index.fqn]
        if entry.dtype is None:
            return self._stream.read_object(entry)
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if self._in_pieces or volume(box.lengths) * entry.dtype.itemsize < SMALL:
            return self._stream.read(entry, box)
        return StreamedPayload(
            frame_of(entry.dtype, chunk.sizes),
            lambda: map(memory_of, self._stream.pieces(entry, box)),
        )
