"""The records that say what a checkpoint holds, under torch's names and with torch's fields."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from holdfast._transfer_record import TransferRecord
from holdfast.stateful import StatefulT

__all__ = [
    "STATE_DICT_TYPE",
    "STORAGE_TYPES",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
]


@dataclass
class ChunkStorageMetadata:
    """A chunk: one box of a tensor, stored as one item.

    Attributes:
        offsets: Where the box begins in the tensor, in elements, one number a dimension.
        sizes: How long the box is in each dimension. A zero makes an empty chunk, which is legal.
    """

    offsets: torch.Size
    sizes: torch.Size


# By name, because torch.memory_format does not pickle on every torch that we support.
MEMORY_FORMATS = {
    str(memory_format).removeprefix("torch."): memory_format
    for memory_format in (
        torch.contiguous_format,
        torch.channels_last,
        torch.channels_last_3d,
        torch.preserve_format,
    )
}


@dataclass
class TensorProperties:
    """The properties of a tensor besides its shape. Only ``dtype`` is used when a checkpoint is loaded.

    Attributes:
        dtype: The element type. By default torch's default dtype at the time of the call.
        layout: Deprecated; always ``torch.strided`` in what Holdfast writes.
        requires_grad: Deprecated; recorded and never applied.
        memory_format: Deprecated; payloads are stored row-major whatever it says.
        pin_memory: Deprecated; recorded and never applied.
    """

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = field(default=torch.strided)
    requires_grad: bool = False
    memory_format: torch.memory_format = field(default=torch.contiguous_format)
    pin_memory: bool = False

    def __getstate__(self) -> tuple[torch.dtype, torch.layout, bool, str, bool]:
        name = str(self.memory_format).removeprefix("torch.")
        return (self.dtype, self.layout, self.requires_grad, name, self.pin_memory)

    def __setstate__(self, state: tuple[torch.dtype, torch.layout, bool, str, bool]) -> None:
        self.dtype, self.layout, self.requires_grad, name, self.pin_memory = state
        self.memory_format = MEMORY_FORMATS[name]

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> "TensorProperties":
        """Describe ``tensor``. The memory format is recorded as contiguous: that is how it is stored."""
        return TensorProperties(
            dtype=tensor.dtype,
            layout=tensor.layout,
            requires_grad=tensor.requires_grad,
            memory_format=torch.contiguous_format,
            pin_memory=tensor.is_pinned(),
        )


@dataclass
class TensorStorageMetadata:
    """A tensor: its properties, its shape, and the chunks that make it up.

    Attributes:
        properties: What the tensor is; all its chunks share it.
        size: The shape of the whole tensor.
        chunks: The boxes that were stored. Together they cover the tensor, and none overlaps another.
    """

    properties: TensorProperties
    size: torch.Size
    chunks: list[ChunkStorageMetadata]


@dataclass
class BytesStorageMetadata:
    """A value that is not a tensor, stored whole."""


STORAGE_TYPES: TypeAlias = TensorStorageMetadata | BytesStorageMetadata
"""What a key of a checkpoint can be."""

STATE_DICT_TYPE: TypeAlias = dict[str, StatefulT | Any]
"""What can be saved: names with tensors, containers of them, Stateful objects and plain values."""


@dataclass
class StorageMeta:
    """Facts that a storage tells the planner, and that are kept in the checkpoint.

    Attributes:
        checkpoint_id: The place of the checkpoint, as the caller named it.
        save_id: New for each save.
        load_id: New for each load.
        modules: Names of the parts of the program that took part; free for the storage to use.
    """

    checkpoint_id: str | os.PathLike[str] | None = None
    save_id: str | None = None
    load_id: str | None = None
    modules: list[str] = field(default_factory=list)


class RecordedSave:
    """Has the record of a save. It is no dataclass, so that these attributes are no fields of Metadata."""

    record: TransferRecord | None = None
    user_metadata: Mapping[str, Any] | None = None


@dataclass
class Metadata(RecordedSave):
    """Everything that is known of a checkpoint without reading its data.

    Besides torch's fields it has the attribute ``record``: what the save did, by phase and rank, or None if
    that is not known. Of a checkpoint that was read, it is what was known directly before the commit. And the
    attribute ``user_metadata``: what the caller of the save wanted to keep with the checkpoint.

    Attributes:
        state_dict_metadata: What each flat key holds.
        planner_data: Belongs to the planner: made by its ``create_global_plan``, seen by the planner that
            loads. The default planner keeps the path from each flat key back into the nested state here.
        storage_data: Belongs to the storage: made by its ``finish``, seen by its ``read_data``. The file
            storage keeps the place of each item here.
        storage_meta: What the storage said of itself.
        version: The version of the format of storage_data, if the storage has one.
    """

    state_dict_metadata: dict[str, STORAGE_TYPES]
    planner_data: Any = None
    storage_data: Any = None
    storage_meta: StorageMeta | None = None
    version: str | None = None


@dataclass(frozen=True)
class MetadataIndex:
    """The name of one item: a key and, for a tensor, the offset of a chunk in it.

    Two names of the same item are equal and hash alike whatever their ``index``, which is only a hint.

    Attributes:
        fqn: The flat key.
        offset: Where the chunk begins in the tensor; None for the whole tensor and for other values.
        index: Where the chunk stands in the tensor's list of chunks, so that a search can look there
            first. It may be wrong or missing: check what is there, and fall back to a search.
    """

    fqn: str
    offset: torch.Size | None = None
    index: int | None = field(hash=False, compare=False, default=None)

    def __init__(self, fqn: str, offset: Sequence[int] | None = None, index: int | None = None) -> None:
        # The instance's dict is written directly: a frozen dataclass refuses assignment, and
        # object.__setattr__ is twice as slow, which counts at a million chunks.
        fields = self.__dict__
        fields["fqn"] = fqn
        fields["offset"] = offset if offset is None or type(offset) is torch.Size else torch.Size(offset)
        fields["index"] = index
