"""Checks every byte of the data files that Holdfast wrote: payloads, containers, and what is between them."""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from holdfast._contents.findings import Findings
from holdfast._contents.inventory import StoredChunk
from holdfast._format.item_table import StorageInfo
from holdfast._io.blocks import crc32
from holdfast._io.file_access import FileReader
from holdfast._io.store import FileSource
from holdfast.errors import ChecksumError

# A job's share. Large enough for reads past the page cache, small enough for a bar that moves.
_PIECE = 8 << 20
# Smaller items are read together with their neighbours: one read for thousands of them.
_SMALL = 1 << 20

Job = Callable[[], None]


class KeyedItem(NamedTuple):
    """An item with what the metadata says of it.

    Attributes:
        key: The key that it belongs to.
        item: Where it lies.
        chunk: The chunk of a tensor that it holds; None for an object.
        dtype: The dtype of that tensor.
    """

    key: str
    item: StorageInfo
    chunk: StoredChunk | None = None
    dtype: str = ""


class _Memory(threading.local):
    """A buffer for each thread: taking 8 MiB anew for every piece costs as much as reading them."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def view(self, nbytes: int) -> memoryview:
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        return memoryview(self._buffer)[:nbytes]


_MEMORY = _Memory()


class CheckedFile(NamedTuple):
    """What all jobs of one data file share.

    Attributes:
        store: The checkpoint's folder.
        name: The file.
        rank: For a rank's own part of a checkpoint, that rank.
        report: Takes what is found.
    """

    store: FileSource
    name: str
    rank: int | None
    report: Findings

    def open(self) -> FileReader:
        """Open it. Each job does so: a checkpoint may have more files than a process may have open."""
        return self.store.open(self.name)

    def damage(self, kind: str, message: str, key: str | None, offset: int, nbytes: int) -> None:
        """Report that something is wrong with a place of it."""
        keys = [] if key is None else [key]
        self.report.damage(
            kind, message, file=self.name, keys=keys, offset=offset, nbytes=nbytes, rank=self.rank
        )


def holdfast_jobs(file: CheckedFile, items: Iterable[KeyedItem], nbytes: int) -> Iterator[Job]:
    """Jobs that together check each byte of a file once.

    Args:
        file: The file.
        items: What should be in it; all of it lies within ``nbytes``.
        nbytes: How much of the file is to be checked.
    """
    batch: list[KeyedItem] = []
    begin = at = 0
    for keyed in sorted(items, key=lambda keyed: keyed.item.offset):
        item, end = keyed.item, keyed.item.end
        alone, far = item.length > _SMALL, item.offset - at > _SMALL
        if batch and (alone or far or end - begin > _PIECE):
            yield _batch_job(file, batch, begin, at)
            batch = []
        if alone or far:
            yield from _gap_jobs(file, at, item.offset)
            at = item.offset
        if alone:
            yield from _large_jobs(file, keyed)
        else:
            if not batch:
                begin = min(at, item.offset)
            batch.append(keyed)
        at = max(at, end)
    if batch:
        yield _batch_job(file, batch, begin, at)
    yield from _gap_jobs(file, at, nbytes)


def safetensors_jobs(file: CheckedFile, items: Iterable[KeyedItem]) -> Iterator[Job]:
    """Jobs that check the tensors of a safetensors file, as far as checksums are known.

    The header was checked when it was read: checksums belong to a header.
    """
    for keyed in sorted(items, key=lambda keyed: keyed.item.offset):
        if keyed.item.is_checked:
            yield from _payload_jobs(file, keyed)
        else:
            file.report.leave_unchecked("tensors of a safetensors file that has no checksums")


def _gap_jobs(file: CheckedFile, begin: int, end: int) -> Iterator[Job]:
    for at in range(begin, end, _PIECE):
        yield _batch_job(file, [], at, min(at + _PIECE, end))


def _batch_job(file: CheckedFile, batch: list[KeyedItem], begin: int, end: int) -> Job:
    """Check small neighbours, and that what is between them is zeros."""

    def job() -> None:
        view = _MEMORY.view(end - begin)
        with file.open() as reader:
            reader.read_into(begin, view)
        at = begin
        for key, item, *_ in batch:
            _check_zeros(file, view[at - begin : max(item.offset, at) - begin], at)
            content = view[item.offset - begin : item.offset - begin + item.length]
            payload_end = item.payload_offset + item.payload_nbytes
            _check_wrap(file, key, item, content[: item.payload_offset], content[payload_end:])
            _check_blocks(file, key, item, content[item.payload_offset : payload_end], 0)
            at = max(at, item.end)
        _check_zeros(file, view[at - begin :], at)
        file.report.advance(end - begin)

    return job


def _large_jobs(file: CheckedFile, keyed: KeyedItem) -> Iterator[Job]:
    item = keyed.item

    def check_wrap() -> None:
        payload_end = item.payload_offset + item.payload_nbytes
        head, tail = bytearray(item.payload_offset), bytearray(item.length - payload_end)
        with file.open() as reader:
            reader.read_into(item.offset, head)
            reader.read_into(item.offset + payload_end, tail)
        _check_wrap(file, keyed.key, item, head, tail)
        file.report.advance(len(head) + len(tail))

    yield check_wrap
    yield from _payload_jobs(file, keyed)


def _payload_jobs(file: CheckedFile, keyed: KeyedItem) -> Iterator[Job]:
    item = keyed.item
    # Cut where blocks end, so that none is read twice.
    step = -(-_PIECE // item.block_size) * item.block_size
    for start in range(0, item.payload_nbytes, step):
        yield _piece_job(file, keyed, start, min(start + step, item.payload_nbytes))


def _piece_job(file: CheckedFile, keyed: KeyedItem, start: int, stop: int) -> Job:
    item = keyed.item

    def job() -> None:
        view = _MEMORY.view(stop - start)
        with file.open() as reader:
            try:
                reader.read_blocks_into(view, item.payload, start)
            except ChecksumError:
                # It stops at the first bad block; all of them are wanted.
                reader.read_into(item.payload.offset + start, view)
                _check_blocks(file, keyed.key, item, view, start)
        file.report.advance(stop - start)

    return job


def _check_zeros(file: CheckedFile, gap: memoryview, offset: int) -> None:
    if len(gap) and bytes(gap).count(0) != len(gap):
        message = "bytes that belong to no item should be zeros and are not"
        file.damage("gap", message, None, offset, len(gap))


def _check_wrap(
    file: CheckedFile, key: str, item: StorageInfo, head: memoryview | bytearray, tail: memoryview | bytearray
) -> None:
    if crc32(tail, crc32(head)) != item.wrap_checksum:
        message = "the container around the bytes is not the one that was written"
        file.damage("container", message, key, item.offset, item.length)


def _check_blocks(file: CheckedFile, key: str, item: StorageInfo, payload: memoryview, start: int) -> None:
    """Check whole blocks, of which the first begins at ``start`` of the item's payload."""
    size, crcs = item.block_size, item.payload.crcs
    for at in range(0, len(payload), size):
        block = payload[at : at + size]
        if crc32(block) != crcs[(start + at) // size]:
            offset = item.payload.offset + start + at
            message = "the bytes are not the ones that were written"
            file.damage("checksum", message, key, offset, len(block))
