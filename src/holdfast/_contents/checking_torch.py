"""Checks what can be checked of data files that torch wrote: the archives that its items are."""

import io
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import IO

from holdfast._contents.checking import CheckedFile, KeyedItem
from holdfast._contents.findings import Findings
from holdfast._contents.item_bytes import LARGEST_UNDECLARED, ItemBytes, ItemRules, undo_transforms
from holdfast._format.dtypes import DTYPES
from holdfast._format.torch_item_reader import read_item_layout
from holdfast._format.torch_item_zip import Archive
from holdfast._geometry import volume
from holdfast._human_units import shape_text
from holdfast._io.blocks import crc32
from holdfast._io.pool import Budget, Cancellation
from holdfast.errors import ChecksumError, ExtensionError, IntegrityError
from holdfast.extension import ExtensionRegistry

LIMITS = (
    "torch keeps one CRC-32 for each record of an item and none for the metadata, for the headers between "
    "records, or of which save a file belongs to: an item replaced by a sound one of the same kind is not "
    "noticed."
)

_PIECE = 1 << 20
_BATCH = 8 << 20
# Inflated items up to this size are checked in memory, larger ones in a temporary file.
_IN_MEMORY = 32 << 20
_MOST_RECORDS = 1 << 24

ReadAt = Callable[[int, int], bytes]


def torch_jobs(file: CheckedFile, items: Iterable[KeyedItem]) -> Iterator[Callable[[], None]]:
    """Jobs that check the items of one file, each a few MiB of them."""
    batch: list[KeyedItem] = []
    nbytes = 0
    for stored in sorted(items, key=lambda stored: stored.item.offset):
        batch.append(stored)
        nbytes += stored.item.length
        if nbytes >= _BATCH:
            yield partial(_check_batch, file, batch)
            batch, nbytes = [], 0
    if batch:
        yield partial(_check_batch, file, batch)


def _check_batch(file: CheckedFile, batch: list[KeyedItem]) -> None:
    rules = ItemRules(file.store, ExtensionRegistry(), Cancellation(), Budget(_BATCH), verify=False)
    with file.open() as reader:
        for stored in batch:
            item = ItemBytes(rules, reader, stored.item)
            try:
                _check_item(item, stored, file.report)
            except IntegrityError as error:
                kind = "checksum" if isinstance(error, ChecksumError) else "archive"
                message = _without_path(error, reader.path, stored.key)
                file.damage(kind, message, stored.key, item.info.offset, item.info.length)
            file.report.advance(item.info.length)


def _check_item(item: ItemBytes, stored: KeyedItem, report: Findings) -> None:
    nbytes, path = item.info.length, item.file.path
    if item.info.transform_descriptors:
        _check_transformed(item, stored, report)
    elif nbytes <= _PIECE:
        # Small ones are read once, and looked at in memory.
        _check_archive(_reading(io.BytesIO(item.read_at(0, nbytes))), nbytes, stored, report, path)
    else:
        _check_archive(item.read_at, nbytes, stored, report, path)


def _without_path(error: Exception, path: str, key: str) -> str:
    """The error's message without the file and the key, which stand beside it."""
    text = str(error)
    for prefix in (f"{path}, key {key!r}: ", f"{path}: "):
        text = text.removeprefix(prefix)
    return text


def _check_archive(read_at: ReadAt, nbytes: int, stored: KeyedItem, report: Findings, path: str) -> None:
    """Compare every record with its CRC-32, and a tensor's dtype and shape with the metadata.

    Raises:
        IntegrityError: Something does not fit.
    """
    if stored.chunk is None and not _looks_like_archive(read_at, nbytes):
        report.leave_unchecked("an object in a form of its planner's, without a checksum")
        return
    archive = Archive(read_at, nbytes, path=path, key=stored.key, most_records=_MOST_RECORDS)
    records = archive.records.values()
    if not all(record.plain for record in records):
        if "data.pkl" in archive.records:
            archive.damaged("a record is compressed or encrypted")
        report.leave_unchecked("an archive with compressed records, which torch never writes")
        return
    for record in records:
        found, start = 0, archive.content_at(record)
        for at in range(0, record.nbytes, _PIECE):
            found = crc32(read_at(start + at, min(_PIECE, record.nbytes - at)), found)
        if found != record.crc32 and not _without_checksums(archive):
            raise ChecksumError(
                f"record {record.name} has CRC-32 {found:#010x}, expected {record.crc32:#010x}", path=path
            )
    if _without_checksums(archive):
        report.leave_unchecked("saved without checksums")
    _check_layout(read_at, nbytes, stored, path)


def _looks_like_archive(read_at: ReadAt, nbytes: int) -> bool:
    return read_at(0, 4) == b"PK\3\4" or (nbytes >= 22 and read_at(nbytes - 22, 4) == b"PK\5\6")


def _without_checksums(archive: Archive) -> bool:
    # torch writes 0 for every record when told to compute none.
    return all(record.crc32 == 0 for record in archive.records.values())


def _check_layout(read_at: ReadAt, nbytes: int, stored: KeyedItem, path: str) -> None:
    """Whether the tensor inside is the one that the metadata speaks of, as far as dtype and shape tell."""
    if stored.chunk is None:
        return
    layout = read_item_layout(read_at, nbytes, path=path, key=stored.key)
    if layout is not None and (layout.dtype, layout.shape) != (stored.dtype, stored.chunk.lengths):
        raise IntegrityError(
            f"it holds a {layout.dtype} tensor of shape {shape_text(layout.shape)}, but the metadata says "
            f"{stored.dtype} {shape_text(stored.chunk.lengths)}: the file belongs to another checkpoint",
            path=path,
        )


def _check_transformed(item: ItemBytes, stored: KeyedItem, report: Findings) -> None:
    path = item.file.path
    try:
        stream = undo_transforms(item)
    except ExtensionError:
        names = ", ".join(item.info.transform_descriptors or ())
        report.leave_unchecked(f"behind {names}, which cannot be undone here")
        return
    limit = _limit_of(stored)
    with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY) as inflated:
        while piece := stream.read(_PIECE):
            inflated.write(piece)
            if inflated.tell() > limit:
                raise IntegrityError(f"it inflates beyond {limit} bytes", path=path)
        _check_archive(_reading(inflated), inflated.tell(), stored, report, path)


def _limit_of(stored: KeyedItem) -> int:
    """The most bytes that there may be behind the transforms of an item."""
    if stored.chunk is None or stored.dtype not in DTYPES:
        return LARGEST_UNDECLARED
    # The container of a tensor is little more than its elements.
    return volume(stored.chunk.lengths) * DTYPES[stored.dtype].itemsize + _PIECE


def _reading(file: IO[bytes]) -> ReadAt:
    def read_at(offset: int, nbytes: int) -> bytes:
        file.seek(offset)
        return file.read(nbytes)

    return read_at
