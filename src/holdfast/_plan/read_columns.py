"""The lines of a load plan as columns: whole tensors by number, and records only for what is cut."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from holdfast._deferred import DeferredList
from holdfast._format.description import Directory
from holdfast.metadata import MetadataIndex
from holdfast.planner import LoadItemType, LoadPlan, ReadItem

__all__ = ["ReadColumns", "ReadItems", "keys_of"]

_NOWHERE = torch.Size([0])


class ReadColumns:
    """What one rank reads.

    Attributes:
        directory: What the checkpoint holds.
        keys: The flat key of each line.
        rows: The number of the item that it reads, counted over the whole checkpoint.
        boxes: The records of lines that read a part of an item, or fill a part of a tensor; by the number
            of the line. Every other line reads an object, or a tensor whole as it was saved.
    """

    __slots__ = ("boxes", "directory", "keys", "rows")

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.keys: list[str] = []
        self.rows: list[int] = []
        self.boxes: dict[int, ReadItem] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def add_box(self, line: ReadItem, row: int) -> None:
        """A line that cannot be told from its key alone."""
        self.boxes[len(self.keys)] = line
        self.keys.append(line.dest_index.fqn)
        self.rows.append(row)

    def take(self, numbers: Iterable[int]) -> "ReadColumns":
        """Some of the lines."""
        taken = ReadColumns(self.directory)
        for number in numbers:
            if number in self.boxes:
                taken.boxes[len(taken.keys)] = self.boxes[number]
            taken.keys.append(self.keys[number])
            taken.rows.append(self.rows[number])
        return taken

    def lines(self) -> Iterator[ReadItem]:
        """The lines as records."""
        return map(self.line, range(len(self.keys)))

    def line(self, number: int) -> ReadItem:
        """One line as a record."""
        box = self.boxes.get(number)
        if box is not None:
            return box
        key = self.keys[number]
        of_key = self.directory.numbers[key]
        if self.directory.kinds[of_key]:
            index = MetadataIndex(key)
            return ReadItem(LoadItemType.BYTE_IO, index, _NOWHERE, index, _NOWHERE, _NOWHERE)
        shape = torch.Size(self.directory.shape(of_key))
        zeros = torch.Size([0] * len(shape))
        index = MetadataIndex(key, zeros, 0)
        return ReadItem(LoadItemType.TENSOR, index, zeros, index, zeros, shape)


class ReadItems(DeferredList[ReadItem]):
    """The ``items`` of a load plan that is columns until somebody looks at a line."""

    __slots__ = ("columns",)

    def __init__(self, columns: ReadColumns) -> None:
        super().__init__(len(columns), columns.lines)
        self.columns: ReadColumns | None = columns

    def let_go(self) -> None:
        """The lines may be changed now, and the columns would not know."""
        self.columns = None


def keys_of(plan: LoadPlan) -> list[str]:
    """The key of each line of a plan."""
    lines: Any = plan.items
    if isinstance(lines, ReadItems) and lines.columns is not None:
        return lines.columns.keys
    return [line.dest_index.fqn for line in lines]
