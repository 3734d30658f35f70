"""Resharding: which boxes of which stored chunks fill a tensor, and the proof that none is missing."""

from collections.abc import Iterator, Sequence
from operator import sub
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast._format.description import Directory
from holdfast._geometry import Box, cover_of, intersect
from holdfast._plan.metadata_entries import chunk_boxes, is_one_whole_chunk
from holdfast._plan.read_columns import ReadBox, ReadColumns
from holdfast._tensors.checkpointable import describes_itself
from holdfast._tensors.chunks import is_sharded, local_chunks
from holdfast._tensors.layout_table import Layout, LayoutTable
from holdfast.errors import InvalidPlanError
from holdfast.metadata import ChunkStorageMetadata

# From so many chunks on it is cheaper to look for the ones that matter in one pass over the columns.
_MANY = 16


class Resharding:
    """Adds to a load plan what fills the tensors of a state.

    What fills tensors that are divided alike, here and in the checkpoint, is found and proved once.

    Args:
        columns: The plan.
        layouts: The layouts of the state's tensors.
    """

    def __init__(self, columns: ReadColumns, layouts: LayoutTable) -> None:
        self._columns = columns
        self._layouts = layouts
        self._known: dict[Any, list[ReadBox]] = {}

    def fill_tensor(self, key: str, number: int, value: Any, layout: Layout | None = None) -> None:
        """Add the items that together fill what this rank holds of ``value``.

        Args:
            key: The tensor's key.
            number: The key's number in the checkpoint.
            value: The state's tensor.
            layout: Its layout, if that is known already.

        Raises:
            InvalidPlanError: The stored chunks leave an element of it unwritten.
        """
        columns, directory = self._columns, self._columns.directory
        row = directory.row[number]
        if layout is None and not is_sharded(value) and is_one_whole_chunk(directory, number):
            columns.keys.append(key)
            columns.rows.append(row)
            return
        if layout is None and isinstance(value, DTensor) and not describes_itself(value):
            layout = self._layouts.of(value)
        if layout is not None:
            what = (layout, directory.layout(number))
            boxes = self._known.get(what)
            if boxes is None:
                boxes = self._known[what] = _fill_chunks(directory, key, number, layout.chunks)
        else:
            boxes = _fill_chunks(directory, key, number, local_chunks(value))
        for box in boxes:
            columns.add_box(key, row + box.storage[1], box)


def _fill_chunks(
    directory: Directory, key: str, number: int, chunks: Sequence[ChunkStorageMetadata]
) -> list[ReadBox]:
    """The boxes that together fill chunks of a tensor. Raises InvalidPlanError if an element is in none."""
    boxes = []
    for local, wanted in enumerate(chunks):
        of_chunk = list(fill_chunk(directory, number, wanted, local))
        hole = cover_of(wanted.sizes, [Box(box.dest_offsets, box.lengths) for box in of_chunk])
        if hole is not None:
            start = tuple(a + b for a, b in zip(hole.offsets, wanted.offsets, strict=True))
            raise InvalidPlanError(
                f"{key}: no chunk of the checkpoint holds the elements from {start} with lengths "
                f"{hole.lengths}; the checkpoint is incomplete, and loading it would leave them as they are",
                key=key,
            )
        boxes += of_chunk
    return boxes


def fill_chunk(
    directory: Directory, number: int, wanted: ChunkStorageMetadata, local: int
) -> Iterator[ReadBox]:
    """The boxes that fill a chunk of a tensor, as far as stored chunks have its elements.

    Args:
        directory: What the checkpoint holds.
        number: The tensor's number in it.
        wanted: The chunk.
        local: The chunk's number among those that this rank holds.
    """
    size, box = torch.Size, Box(tuple(wanted.offsets), tuple(wanted.sizes))
    for position, chunk in _candidates(directory, number, box):
        both = intersect(box, chunk)
        if both is not None:
            yield ReadBox(
                ChunkStorageMetadata(size(both.offsets), size(both.lengths)),
                (wanted.offsets, local),
                size(map(sub, both.offsets, box.offsets)),
                (size(chunk.offsets), position),
                size(map(sub, both.offsets, chunk.offsets)),
                both == chunk,
            )


def _candidates(directory: Directory, number: int, box: Box) -> list[tuple[int, Box]]:
    """The chunks of a tensor that may meet a box, each with its number among them."""
    if directory.count[number] < _MANY or not directory.ndim[number]:
        return [(at, Box(tuple(o), tuple(n))) for at, (o, n) in enumerate(directory.boxes(number))]
    offsets, lengths = chunk_boxes(directory, number)
    low, extent = torch.tensor(box.offsets, device="cpu"), torch.tensor(box.lengths, device="cpu")
    meets = ((offsets < low + extent) & (offsets + lengths > low)).all(1).nonzero().flatten()
    found = zip(meets.tolist(), offsets[meets].tolist(), lengths[meets].tolist(), strict=True)
    return [(at, Box(tuple(o), tuple(n))) for at, o, n in found]
