"""Owns reading boxes of stored tensors into memory of their own: a plan, and the planner that takes it."""

import io
from collections.abc import Sequence
from operator import sub

import torch

from holdfast._geometry import Box, intersect
from holdfast._tensors.dtensors import narrowed
from holdfast.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from holdfast.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem


class BoxPlanner(LoadPlanner):
    """Reads boxes of tensors of a checkpoint, as they are stored.

    Args:
        metadata: What the checkpoint holds.
        wanted: The key of each tensor, and the box of it.

    Attributes:
        tensors: The memory of each box.
        plan: What fills it. Elements that no chunk has are left as they are.
        stream: An object, if one was read.
    """

    def __init__(self, metadata: Metadata, wanted: Sequence[tuple[str, Box]] = ()) -> None:
        self.tensors: list[torch.Tensor] = []
        self.plan = LoadPlan([])
        self.stream: io.BytesIO | None = None
        for number, (key, box) in enumerate(wanted):
            entry = metadata.state_dict_metadata[key]
            assert isinstance(entry, TensorStorageMetadata)
            self.tensors.append(torch.empty(box.lengths, dtype=entry.properties.dtype, device="cpu"))
            self.plan.items += _lines(number, key, entry, box)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert read_item.dest_index.index is not None
        whole = self.tensors[read_item.dest_index.index]
        return narrowed(whole, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:  # noqa: ARG002 - there is one
        self.stream = value


def _lines(number: int, key: str, entry: TensorStorageMetadata, box: Box) -> list[ReadItem]:
    """What to read of which stored chunks to fill the box of a number."""
    lines = []
    for place, chunk in enumerate(entry.chunks):
        common = intersect(box, Box(tuple(chunk.offsets), tuple(chunk.sizes)))
        if common is not None:
            dest, storage = MetadataIndex(key, None, number), MetadataIndex(key, chunk.offsets, place)
            in_box, in_chunk = (
                torch.Size(map(sub, common.offsets, start)) for start in (box.offsets, chunk.offsets)
            )
            lengths = torch.Size(common.lengths)
            lines.append(ReadItem(LoadItemType.TENSOR, dest, in_box, storage, in_chunk, lengths))
    return lines
