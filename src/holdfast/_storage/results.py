"""Owns what was written where, as columns: the results of a save without an object for each item."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast._deferred import DeferredList
from holdfast._format.item_table import COLUMNS, StorageInfo, default_number
from holdfast._plan.interning import pack, unpack
from holdfast.errors import IncompleteWriteError
from holdfast.metadata import MetadataIndex
from holdfast.storage import WriteResult

_DEFAULTS = {column.name: default_number(field) for field, column in COLUMNS.items()}
_NAMES = ("chunk_offsets", "hints", *_DEFAULTS)
_LISTS = {column.listed_in: None for column in COLUMNS.values() if column.listed_in}

Lists = Mapping[str, Sequence[Any]]
"""What the numbers of some columns refer to, by the name of the list in the manifest."""


class WrittenItems:
    """Items while they are being written: one number for each column of the item table and item.

    A column that stays empty has the default of its field for all items.

    Attributes:
        keys: The flat key of each item.
        columns: The columns of the item table; ``chunk_offsets``, the number of each item's offset among
            those of the plan, -1 for what is not a tensor; and ``hints``, its place among the chunks of its
            key, -1 if that is not known.
        checksums: The checksums of all blocks of all items.
    """

    __slots__ = ("checksums", "columns", "keys")

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.columns: dict[str, list[int]] = {name: [] for name in _NAMES}
        self.checksums = bytearray()

    def add(self, keys: Iterable[str], checksums: bytes | bytearray, **numbers: Iterable[int]) -> None:
        """Add some items: for each named column the number of each item."""
        self.keys += keys
        self.checksums += checksums
        for name, of_items in numbers.items():
            self.columns[name] += of_items

    def extend(self, other: "WrittenItems") -> None:
        """Add those of another file."""
        self.add(other.keys, other.checksums, **other.columns)

    def sealed(self, chunk_offsets: Sequence[torch.Size | None], lists: Lists) -> "ResultColumns":
        """All of it as columns that do not change any more.

        Args:
            chunk_offsets: The offsets that items refer to.
            lists: The files, the transforms and whatever else numbers refer to. One that is missing has
                None alone.
        """
        columns = {
            name: array("q", _shortened(self.columns[name] or [_DEFAULTS.get(name, -1)])).tobytes()
            for name in _NAMES
        }
        known = {name: list(lists.get(name, [None])) for name in _LISTS}
        return ResultColumns(self.keys, columns, bytes(self.checksums), chunk_offsets, known)


def _shortened(numbers: list[int]) -> list[int]:
    """One number for a column that has the same number everywhere."""
    return numbers[:1] if numbers.count(numbers[0]) == len(numbers) else numbers


@dataclass(frozen=True, eq=False)
class ResultColumns:
    """The items that were written.

    Attributes:
        keys: The flat key of each item.
        columns: Each column's numbers, or one number if all are the same; 64 bits each.
        checksums: The checksums of all blocks of all items, 4 bytes each.
        chunk_offsets: The offsets that the column of this name refers to.
        lists: What the numbers of other columns refer to.
    """

    keys: list[str]
    columns: dict[str, bytes]
    checksums: bytes
    chunk_offsets: Sequence[torch.Size | None]
    lists: Lists

    def __len__(self) -> int:
        return len(self.keys)

    def column(self, name: str) -> torch.Tensor:
        """One of the columns: a number for each item."""
        return torch.frombuffer(bytearray(self.columns[name]), dtype=torch.int64).expand(len(self.keys))

    def results(self) -> Iterator[WriteResult]:
        """The result of each item as a record."""
        columns = {name: self.column(name).tolist() for name in _NAMES}
        offsets = [*self.chunk_offsets, None]
        at = 0
        for row, key in enumerate(self.keys):
            values: dict[str, Any] = {}
            for field, column in COLUMNS.items():
                number = columns[column.name][row]
                values[field] = self.lists[column.listed_in][number] if column.listed_in else number
            end = at + 4 * columns["blocks"][row]
            values["checksums"], at = self.checksums[at:end], end
            hint = columns["hints"][row]
            index = MetadataIndex(key, offsets[columns["chunk_offsets"][row]], None if hint < 0 else hint)
            yield WriteResult(index, values["length"], StorageInfo(**values))

    def __reduce__(self) -> Any:
        offsets = [None if offset is None else tuple(offset) for offset in self.chunk_offsets]
        return _as_received, (pack(self.keys), self.columns, self.checksums, offsets, self.lists)


def _as_received(
    keys: bytes,
    columns: dict[str, bytes],
    checksums: bytes,
    chunk_offsets: list[tuple[int, ...] | None],
    lists: Lists,
) -> ResultColumns:
    sizes = [None if offset is None else torch.Size(offset) for offset in chunk_offsets]
    return ResultColumns(list(unpack(keys, list)), columns, checksums, sizes, lists)


class Results(DeferredList[WriteResult]):
    """The results of ``write_data``: columns until somebody looks at one."""

    __slots__ = ()

    def __init__(self, columns: ResultColumns) -> None:
        super().__init__(len(columns), columns.results, columns)

    def __reduce_ex__(self, protocol: Any) -> Any:
        columns = self.columns
        return super().__reduce_ex__(protocol) if columns is None else (Results, (columns,))


def result_columns(results: Sequence[WriteResult]) -> ResultColumns:
    """Results as columns, whatever they are."""
    columns: ResultColumns | None = results.columns if isinstance(results, Results) else None
    if columns is not None:
        return columns
    items = WrittenItems()
    lists: dict[str, dict[Any, int]] = {name: {} for name in _LISTS}
    offsets = [result.index.offset for result in results]
    for row, result in enumerate(results):
        index, info = result.index, result.storage_data
        if not isinstance(info, StorageInfo) or not info.is_checked:
            raise IncompleteWriteError(
                f"{index.fqn}: write_data gave the place {info!r}, which has no checksums: a load could not "
                "check its bytes. Write items with holdfast.filesystem._write_item, and return its results.",
                key=index.fqn,
                found=info,
            )
        numbers = {
            "chunk_offsets": -1 if index.offset is None else row,
            "hints": -1 if index.index is None else index.index,
        }
        for field, column in COLUMNS.items():
            value = getattr(info, field)
            if column.listed_in:
                values = lists[column.listed_in]
                value = (tuple(value) or None) if isinstance(value, list | tuple) else value
                numbers[column.name] = values.setdefault(value, len(values))
            else:
                numbers[column.name] = len(value) // 4 if field == "checksums" else value
        items.add([index.fqn], info.checksums, **{name: [number] for name, number in numbers.items()})
    return items.sealed(offsets, {name: list(values) for name, values in lists.items()})
