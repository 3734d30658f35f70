"""What was written where, as columns: the results of a save without an object for each."""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from holdfast._deferred import DeferredList
from holdfast._plan.interning import pack, unpack
from holdfast._plan.metadata_entries import column_of
from holdfast._storage.record import StorageInfo
from holdfast.metadata import MetadataIndex
from holdfast.storage import WriteResult

__all__ = ["NUMBERS", "Notes", "ResultColumns", "Results", "result_columns"]

NUMBERS = (
    *("offset", "hint", "file", "start", "nbytes", "payload_start", "payload_nbytes", "raw_nbytes"),
    *("wrap", "blocks"),
)
"""The numbers that are kept for each item: see :class:`Notes`."""


class Notes:
    """The places of items, while they are being written.

    Attributes:
        keys: The flat key of each item.
        offset: The number of its offset among those of the plan; -1 for what is not a tensor.
        hint: Its place among the chunks of its key; -1 if that is not known.
        file: The number of its file.
        start: Where it begins in the file.
        nbytes: How long it is there.
        payload_start: Where the checked bytes begin in it.
        payload_nbytes: How many they are.
        raw_nbytes: Its length before transforms.
        wrap: The checksum of what is around the checked bytes.
        blocks: How many checksums of blocks it has.
        checksums: The checksums of all blocks of all items.
    """

    __slots__ = ("checksums", "keys", *NUMBERS)

    offset: list[int]
    hint: list[int]
    file: list[int]
    start: list[int]
    nbytes: list[int]
    payload_start: list[int]
    payload_nbytes: list[int]
    raw_nbytes: list[int]
    wrap: list[int]
    blocks: list[int]

    def __init__(self) -> None:
        self.keys: list[str] = []
        for name in NUMBERS:
            setattr(self, name, [])
        self.checksums = bytearray()

    def extend(self, other: "Notes") -> None:
        """Add those of another file."""
        for name in ("keys", *NUMBERS, "checksums"):
            getattr(self, name).extend(getattr(other, name))

    def sealed(
        self,
        offsets: Sequence[torch.Size | None],
        files: list[str],
        descriptors: tuple[str, ...] | None,
    ) -> "ResultColumns":
        """All of it as columns that do not change any more."""
        numbers = array("q")
        for name in NUMBERS:
            numbers.extend(getattr(self, name))
        return ResultColumns(self.keys, numbers.tobytes(), bytes(self.checksums), offsets, files, descriptors)


class ResultColumns:
    """The places of items.

    Attributes:
        keys: The flat key of each item.
        numbers: For each of ``NUMBERS`` a row of integers, one for each item.
        checksums: The checksums of all blocks of all items, 4 bytes each.
        offsets: The offsets that items refer to.
        files: The names of the files that items refer to.
        descriptors: The transforms that all items went through.
    """

    __slots__ = ("checksums", "descriptors", "files", "keys", "numbers", "offsets")

    def __init__(
        self,
        keys: list[str],
        numbers: bytes,
        checksums: bytes,
        offsets: Sequence[torch.Size | None],
        files: list[str],
        descriptors: tuple[str, ...] | None,
    ) -> None:
        self.keys = keys
        self.numbers = (
            torch.frombuffer(bytearray(numbers), dtype=torch.int64).view(len(NUMBERS), -1)
            if numbers
            else torch.empty(len(NUMBERS), 0, dtype=torch.int64)
        )
        self.checksums = checksums
        self.offsets = offsets
        self.files = files
        self.descriptors = descriptors

    def __len__(self) -> int:
        return len(self.keys)

    def column(self, name: str) -> torch.Tensor:
        """One of the numbers, for all items."""
        return self.numbers[NUMBERS.index(name)]

    def results(self) -> Iterator[WriteResult]:
        """The result of each item as a record."""
        offsets = [*self.offsets, None]
        at = 0
        rows = zip(self.keys, *self.numbers.tolist(), strict=True)
        for key, offset, hint, file, start, nbytes, payload, payload_nbytes, raw, wrap, blocks in rows:
            sums = self.checksums[at : at + 4 * blocks]
            at += 4 * blocks
            place = StorageInfo(
                self.files[file], start, nbytes, self.descriptors, payload, payload_nbytes, raw, sums, wrap
            )
            index = MetadataIndex(key, offsets[offset], None if hint < 0 else hint)
            yield WriteResult(index, nbytes, place)

    def __reduce__(self) -> Any:
        offsets = [None if offset is None else tuple(offset) for offset in self.offsets]
        rest = (column_of(self.numbers), self.checksums, offsets, self.files, self.descriptors)
        return _as_received, (pack(self.keys), *rest)


def _as_received(
    keys: bytes,
    numbers: bytes,
    checksums: bytes,
    offsets: list[tuple[int, ...] | None],
    files: list[str],
    descriptors: tuple[str, ...] | None,
) -> ResultColumns:
    sizes = [None if offset is None else torch.Size(offset) for offset in offsets]
    return ResultColumns(list(unpack(keys, list)), numbers, checksums, sizes, files, descriptors)


class Results(DeferredList[WriteResult]):
    """The results of ``write_data``: columns until somebody looks at one."""

    __slots__ = ("columns",)

    def __init__(self, columns: ResultColumns) -> None:
        super().__init__(len(columns), columns.results)
        self.columns: ResultColumns | None = columns

    def let_go(self) -> None:
        """The results may be replaced now, and the columns would not know."""
        self.columns = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.columns is not None:
            return Results, (self.columns,)
        return super().__reduce_ex__(protocol)


def result_columns(results: Sequence[WriteResult]) -> list[ResultColumns]:
    """Results as columns, whatever they are: one set of columns for each stack of transforms."""
    if isinstance(results, Results) and results.columns is not None:
        return [results.columns]
    made: dict[tuple[str, ...] | None, tuple[Notes, list[Any], dict[str, int]]] = {}
    for result in results:
        info: StorageInfo = result.storage_data
        descriptors = tuple(info.transform_descriptors) if info.transform_descriptors else None
        notes, offsets, files = made.setdefault(descriptors, (Notes(), [], {}))
        hint = result.index.index
        notes.keys.append(result.index.fqn)
        notes.offset.append(-1 if result.index.offset is None else len(offsets))
        offsets.append(result.index.offset)
        notes.hint.append(-1 if hint is None else hint)
        notes.file.append(files.setdefault(info.relative_path, len(files)))
        notes.start.append(info.offset)
        notes.nbytes.append(info.length)
        notes.payload_start.append(info.payload_offset)
        notes.payload_nbytes.append(info.payload_nbytes)
        notes.raw_nbytes.append(info.raw_nbytes)
        notes.wrap.append(info.wrap_checksum)
        notes.blocks.append(len(info.checksums) // 4)
        notes.checksums += info.checksums
    return [
        notes.sealed(offsets, list(files), descriptors)
        for descriptors, (notes, offsets, files) in made.items()
    ]
