"""What was written where, as columns: the results of a save without an object for each."""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from holdfast._deferred import DeferredList
from holdfast._storage.record import StorageInfo
from holdfast.metadata import MetadataIndex
from holdfast.storage import WriteResult

__all__ = ["ResultColumns", "Results", "result_columns"]

_NUMBERS = ("offset", "hints", "file", "start", "nbytes", "payload_start", "payload_nbytes", "raw_nbytes")
_SMALL_NUMBERS = ("wraps", "blocks")


class ResultColumns:
    """The places of items. Each attribute but the last four has an entry for each item.

    Attributes:
        keys: Its flat key.
        offset: The number of its offset in ``offsets``.
        hints: Its place among the chunks of its key; -1 if that is not known.
        file: The number of its file in ``files``.
        start: Where it begins in the file.
        nbytes: How long it is there.
        payload_start: Where the checked bytes begin in it.
        payload_nbytes: How many they are.
        raw_nbytes: Its length before transforms.
        wraps: The checksum of what is around the checked bytes.
        blocks: How many checksums of blocks it has.
        checksums: The checksums of all blocks of all items.
        offsets: The offsets; None for what is not a tensor.
        files: The files' names.
        descriptors: The transforms that all items went through.
    """

    __slots__ = ("checksums", "descriptors", "files", "keys", "offsets", *_NUMBERS, *_SMALL_NUMBERS)

    keys: list[str]
    offset: list[int]
    hints: list[int]
    file: list[int]
    start: list[int]
    nbytes: list[int]
    payload_start: list[int]
    payload_nbytes: list[int]
    raw_nbytes: list[int]
    wraps: list[int]
    blocks: list[int]

    def __init__(self, descriptors: tuple[str, ...] | None = None) -> None:
        for name in ("keys", *_NUMBERS, *_SMALL_NUMBERS):
            setattr(self, name, [])
        self.checksums = bytearray()
        self.offsets: list[torch.Size | None] = []
        self.files: list[str] = []
        self.descriptors = descriptors

    def __len__(self) -> int:
        return len(self.keys)

    def extend(self, other: "ResultColumns") -> None:
        """Add the items of another file of the same rank, or of another rank."""
        assert other.descriptors == self.descriptors or not len(self)
        self.descriptors = other.descriptors
        first_file, first_offset = len(self.files), len(self.offsets)
        for name in ("keys", *_NUMBERS, *_SMALL_NUMBERS):
            getattr(self, name).extend(getattr(other, name))
        added = len(other)
        if first_file and added:
            self.file[-added:] = [number + first_file for number in other.file]
        # The files of one plan share their offsets.
        if other.offsets is not self.offsets:
            if first_offset and added:
                self.offset[-added:] = [n if n < 0 else n + first_offset for n in other.offset]
            self.offsets = self.offsets + other.offsets
        self.files += other.files
        self.checksums += other.checksums

    def places(self) -> Iterator[StorageInfo]:
        """The place of each item as a record."""
        at = 0
        for number, blocks in enumerate(self.blocks):
            yield StorageInfo(
                self.files[self.file[number]],
                self.start[number],
                self.nbytes[number],
                self.descriptors,
                self.payload_start[number],
                self.payload_nbytes[number],
                self.raw_nbytes[number],
                bytes(self.checksums[at : at + 4 * blocks]),
                self.wraps[number],
            )
            at += 4 * blocks

    def results(self) -> Iterator[WriteResult]:
        """The result of each item as a record."""
        offsets = [*self.offsets, None]
        names = zip(self.keys, self.offset, self.hints, self.places(), strict=True)
        for key, offset, hint, place in names:
            index = MetadataIndex(key, offsets[offset], None if hint < 0 else hint)
            yield WriteResult(index, place.length, place)

    def __reduce__(self) -> Any:
        numbers = [array("q", getattr(self, name)).tobytes() for name in _NUMBERS]
        small = [array("I", getattr(self, name)).tobytes() for name in _SMALL_NUMBERS]
        return _from_parts, (
            self.keys,
            numbers,
            small,
            bytes(self.checksums),
            self.offsets,
            self.files,
            self.descriptors,
        )


def _from_parts(
    keys: list[str],
    numbers: list[bytes],
    small: list[bytes],
    checksums: bytes,
    offsets: list[torch.Size | None],
    files: list[str],
    descriptors: tuple[str, ...] | None,
) -> ResultColumns:
    made = ResultColumns(descriptors)
    made.keys = keys
    for name, data in zip(_NUMBERS, numbers, strict=True):
        setattr(made, name, memoryview(data).cast("q").tolist())
    for name, data in zip(_SMALL_NUMBERS, small, strict=True):
        setattr(made, name, memoryview(data).cast("I").tolist())
    made.checksums, made.offsets, made.files = bytearray(checksums), offsets, files
    return made


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
    made: dict[tuple[str, ...] | None, ResultColumns] = {}
    for result in results:
        info: StorageInfo = result.storage_data
        descriptors = tuple(info.transform_descriptors) if info.transform_descriptors else None
        columns = made.setdefault(descriptors, ResultColumns(descriptors))
        hint = result.index.index
        if not columns.files or columns.files[-1] != info.relative_path:
            columns.files.append(info.relative_path)
        columns.keys.append(result.index.fqn)
        columns.offset.append(len(columns.offsets))
        columns.offsets.append(result.index.offset)
        columns.hints.append(-1 if hint is None else hint)
        columns.file.append(len(columns.files) - 1)
        columns.start.append(info.offset)
        columns.nbytes.append(info.length)
        columns.payload_start.append(info.payload_offset)
        columns.payload_nbytes.append(info.payload_nbytes)
        columns.raw_nbytes.append(info.raw_nbytes)
        columns.wraps.append(info.wrap_checksum)
        columns.blocks.append(len(info.checksums) // 4)
        columns.checksums += info.checksums
    return list(made.values())
