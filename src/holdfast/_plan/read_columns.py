"""The items of a load plan as columns: whole tensors by number, and records only for what is cut."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from holdfast._deferred import DeferredList
from holdfast._format.description import Directory
from holdfast.metadata import ChunkStorageMetadata, MetadataIndex
from holdfast.planner import LoadItemType, LoadPlan, ReadItem

_NOWHERE = torch.Size([0])


class ReadBox(NamedTuple):
    """Which box of a stored chunk fills which box of this rank's part: all but the key of an item.

    Attributes:
        box: The box, in the tensor.
        dest: The chunk of this rank that it fills, or a box of: where that begins, and its number.
        dest_offsets: Where the box begins in it.
        storage: The stored chunk: where that begins, and its number.
        storage_offsets: Where the box begins in it.
        is_whole: Whether the box is all of the stored chunk.
    """

    box: ChunkStorageMetadata
    dest: tuple[torch.Size, int]
    dest_offsets: torch.Size
    storage: tuple[torch.Size, int]
    storage_offsets: torch.Size
    is_whole: bool

    @property
    def lengths(self) -> torch.Size:
        """The lengths of the box."""
        return self.box.sizes

    def item(self, key: str) -> ReadItem:
        """The item of a tensor as a record."""
        dest, storage = MetadataIndex(key, *self.dest), MetadataIndex(key, *self.storage)
        return ReadItem(
            LoadItemType.TENSOR, dest, self.dest_offsets, storage, self.storage_offsets, self.lengths
        )


@dataclass(slots=True, eq=False)
class ReadColumns:
    """The items of one rank's load plan.

    Attributes:
        directory: What the checkpoint holds.
        keys: The flat key of each item.
        rows: The number of the stored item that it reads, counted over the whole checkpoint.
        boxes: What items read and fill that read a part of a stored item, or fill a part of a tensor; by the
            item's number. Every other item reads an object, or a tensor whole as it was saved.
    """

    directory: Directory
    keys: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    boxes: dict[int, ReadBox] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys)

    def add_box(self, key: str, row: int, box: ReadBox) -> None:
        """Append an item that its key alone does not describe."""
        self.boxes[len(self.keys)] = box
        self.keys.append(key)
        self.rows.append(row)

    def take(self, numbers: Iterable[int]) -> "ReadColumns":
        """Columns of only these items, by their numbers."""
        taken = ReadColumns(self.directory)
        for number in numbers:
            if number in self.boxes:
                taken.boxes[len(taken.keys)] = self.boxes[number]
            taken.keys.append(self.keys[number])
            taken.rows.append(self.rows[number])
        return taken

    def items(self) -> Iterator[ReadItem]:
        """The items as records."""
        return map(self.item, range(len(self.keys)))

    def item(self, number: int) -> ReadItem:
        """One item as a record."""
        key, box = self.keys[number], self.boxes.get(number)
        if box is not None:
            return box.item(key)
        of_key = self.directory.numbers[key]
        if self.directory.kinds[of_key]:
            index = MetadataIndex(key)
            return ReadItem(LoadItemType.BYTE_IO, index, _NOWHERE, index, _NOWHERE, _NOWHERE)
        shape = torch.Size(self.directory.shape(of_key))
        zeros = torch.Size([0] * len(shape))
        index = MetadataIndex(key, zeros, 0)
        return ReadItem(LoadItemType.TENSOR, index, zeros, index, zeros, shape)


class ReadItems(DeferredList[ReadItem]):
    """The ``items`` of a load plan: columns, from which the items are made when one is asked for."""

    __slots__ = ()

    def __init__(self, columns: ReadColumns) -> None:
        super().__init__(len(columns), columns.items, columns)

    def _has_changed(self) -> bool:
        # A ReadItem and all that it holds cannot be changed.
        return False


def read_columns_of(plan: LoadPlan) -> ReadColumns | None:
    """The items of a plan as columns; None if they were made by hand or changed."""
    columns: ReadColumns | None = plan.items.columns if isinstance(plan.items, ReadItems) else None
    return columns


def keys_of(plan: LoadPlan) -> list[str]:
    """The key of each item of a plan."""
    columns = read_columns_of(plan)
    return [item.dest_index.fqn for item in plan.items] if columns is None else columns.keys


def plan_of_keys(plan: LoadPlan, keys: Collection[str]) -> LoadPlan:
    """A plan of those items of ``plan`` that fill some keys."""
    columns = read_columns_of(plan)
    if columns is None:
        return LoadPlan([item for item in plan.items if item.dest_index.fqn in keys])
    return LoadPlan(ReadItems(columns.take(n for n, key in enumerate(columns.keys) if key in keys)))


def stored_keys_of(plan: LoadPlan) -> list[str]:
    """For each item of a plan the key of what it reads: another one than it fills, if a planner renames."""
    columns = read_columns_of(plan)
    return [item.storage_index.fqn for item in plan.items] if columns is None else columns.keys
