"""Resharding: which boxes of which stored chunks fill a tensor, and the proof that none is missing."""

from typing import Any

import torch

from holdfast._format.description import Directory
from holdfast._geometry import Box, cover_of, intersect
from holdfast._plan.metadata_entries import chunk_boxes, is_one_whole_chunk
from holdfast._plan.read_columns import ReadColumns
from holdfast._tensors.chunks import is_sharded, local_chunks
from holdfast.errors import InvalidPlanError
from holdfast.metadata import ChunkStorageMetadata, MetadataIndex
from holdfast.planner import LoadItemType, ReadItem

# From so many chunks on it is cheaper to look for the ones that matter in one pass over the columns.
_MANY = 16


def fill_tensor(columns: ReadColumns, key: str, number: int, value: Any) -> None:
    """Add the items that together fill what this rank holds of ``value``.

    Args:
        columns: The plan so far.
        key: The tensor's key.
        number: The key's number in the checkpoint.
        value: The state's tensor.

    Raises:
        InvalidPlanError: The stored chunks leave an element of it unwritten.
    """
    directory = columns.directory
    if not is_sharded(value) and is_one_whole_chunk(directory, number):
        columns.keys.append(key)
        columns.rows.append(directory.row[number])
        return
    for local, wanted in enumerate(local_chunks(value)):
        _fill_chunk(columns, key, number, wanted, local)


def _fill_chunk(
    columns: ReadColumns, key: str, number: int, wanted: ChunkStorageMetadata, local: int
) -> None:
    directory = columns.directory
    box = Box(tuple(wanted.offsets), tuple(wanted.sizes))
    dest = MetadataIndex(key, wanted.offsets, local)
    covered = []
    for position, chunk in _candidates(directory, number, box):
        both = intersect(box, chunk)
        if both is None:
            continue
        in_dest = tuple(a - b for a, b in zip(both.offsets, box.offsets, strict=True))
        in_chunk = tuple(a - b for a, b in zip(both.offsets, chunk.offsets, strict=True))
        covered.append(Box(in_dest, both.lengths))
        item = ReadItem(
            LoadItemType.TENSOR,
            dest,
            torch.Size(in_dest),
            MetadataIndex(key, chunk.offsets, position),
            torch.Size(in_chunk),
            torch.Size(both.lengths),
        )
        columns.add_box(item, directory.row[number] + position)
    hole = cover_of(box.lengths, covered)
    if hole is not None:
        start = tuple(a + b for a, b in zip(hole.offsets, box.offsets, strict=True))
        raise InvalidPlanError(
            f"{key}: no chunk of the checkpoint holds the elements from {start} with lengths {hole.lengths}; "
            "the checkpoint is incomplete, and loading it would leave them as they are",
            key=key,
        )


def _candidates(directory: Directory, number: int, box: Box) -> list[tuple[int, Box]]:
    """The chunks of a tensor that may meet a box, each with its number among them."""
    if directory.count[number] < _MANY or not directory.ndim[number]:
        return [(at, Box(tuple(o), tuple(n))) for at, (o, n) in enumerate(directory.boxes(number))]
    offsets, lengths = chunk_boxes(directory, number)
    low, extent = torch.tensor(box.offsets), torch.tensor(box.lengths)
    meets = ((offsets < low + extent) & (offsets + lengths > low)).all(1).nonzero().flatten()
    found = zip(meets.tolist(), offsets[meets].tolist(), lengths[meets].tolist(), strict=True)
    return [(at, Box(tuple(o), tuple(n))) for at, o, n in found]
