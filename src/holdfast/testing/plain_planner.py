"""The smallest planners that keep the contract: a flat dict of tensors and bytes, every value whole.

They are what the storage suite saves and loads with, and a place to see a planner without options.
"""

import dataclasses
import io
from typing import Any

import torch

from holdfast.errors import MissingKeyError, ShapeMismatchError
from holdfast.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

__all__ = ["PlainLoadPlanner", "PlainSavePlanner"]


class PlainSavePlanner(SavePlanner):
    """Saves a flat dict of tensors and ``bytes``. A key that several ranks have is written by the lowest."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,  # noqa: ARG002 - this planner has no use for it
        is_coordinator: bool = False,  # noqa: ARG002
    ) -> None:
        """Store the state for the next calls."""
        self.state_dict = state_dict

    def create_local_plan(self) -> SavePlan:
        """Plan one item for each key."""
        return SavePlan([_write_item(key, value) for key, value in self.state_dict.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Let the lowest rank that has a key write it."""
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        plans = []
        for plan in all_plans:
            mine = [item for item in plan.items if item.index.fqn not in entries]
            for item in mine:
                data = item.tensor_data
                entries[item.index.fqn] = (
                    BytesStorageMetadata()
                    if data is None
                    else TensorStorageMetadata(data.properties, data.size, [data.chunk])
                )
            plans.append(dataclasses.replace(plan, items=mine))
        return plans, Metadata(entries)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the value: a tensor, or a stream of the bytes."""
        value = self.state_dict[write_item.index.fqn]
        return value.detach() if isinstance(value, torch.Tensor) else io.BytesIO(value)


def _write_item(key: str, value: torch.Tensor | bytes) -> WriteItem:
    if not isinstance(value, torch.Tensor):
        return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, BytesIOWriteData(len(value)))
    chunk = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.size())
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(value), value.size())
    return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.TENSOR, tensor_data=data)


class PlainLoadPlanner(LoadPlanner):
    """Loads into a flat dict of tensors (in place) and ``bytes`` (replaced)."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: ARG002 - no rank does anything special
    ) -> None:
        """Store the state and the metadata for the next calls."""
        assert metadata is not None
        self.state_dict = state_dict
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Check that every key fits, and plan one item for each stored chunk."""
        stored = self.metadata.state_dict_metadata
        missing = [key for key in self.state_dict if key not in stored]
        if missing:
            raise MissingKeyError(f"not in the checkpoint: {', '.join(missing)}", key=missing[0])
        return LoadPlan([item for key in self.state_dict for item in self._read_items(key)])

    def _read_items(self, key: str) -> list[ReadItem]:
        stored, wanted = self.metadata.state_dict_metadata[key], self.state_dict[key]
        empty = torch.Size()
        if isinstance(stored, BytesStorageMetadata):
            index = MetadataIndex(key)
            return [ReadItem(LoadItemType.BYTE_IO, index, empty, index, empty, empty)]
        if stored.size != wanted.size():
            raise ShapeMismatchError(
                f"{key}: the checkpoint has shape {tuple(stored.size)}, the state {tuple(wanted.size())}",
                key=key,
                expected=tuple(wanted.size()),
                found=tuple(stored.size),
            )
        return [
            ReadItem(
                LoadItemType.TENSOR,
                MetadataIndex(key),
                chunk.offsets,
                MetadataIndex(key, chunk.offsets, number),
                torch.Size([0] * len(chunk.offsets)),
                chunk.sizes,
            )
            for number, chunk in enumerate(stored.chunks)
        ]

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged: every rank reads what it needs."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put the bytes into the state."""
        self.state_dict[read_item.dest_index.fqn] = value.read()

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the part of the state's own tensor that the item fills."""
        tensor: torch.Tensor = self.state_dict[read_item.dest_index.fqn].detach()
        for dimension, (offset, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            tensor = tensor.narrow(dimension, offset, length)
        return tensor
