"""The facts that a view tells of a checkpoint: as a whole, of each key, and in a notebook."""

import html
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from holdfast._contents.findings import Damage
from holdfast._contents.inventory import Ints, Inventory, ObjectEntry, StoredChunk, TensorEntry
from holdfast._format.item_table import StorageInfo
from holdfast._format.names import parse_data_file
from holdfast._human_units import shape_text, size_text

_MOST_SHOWN = 20


@dataclass(frozen=True)
class ChunkInfo:
    """A stored box of a tensor.

    Attributes:
        offsets: Where in the tensor it begins.
        lengths: How far it reaches.
        file: The file that it lies in; None if it is stored nowhere.
        offset: Where it begins in the file, with its container.
        nbytes: How many bytes it takes there.
        rank: The rank that wrote it; None if that is not recorded.
        transforms: What must be undone to read it, such as ``stream.zstd/1``.
    """

    offsets: Ints
    lengths: Ints
    file: str | None
    offset: int | None
    nbytes: int | None
    rank: int | None
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True)
class TensorInfo:
    """A tensor, as far as it is known without reading it.

    Attributes:
        key: Its flat key.
        shape: Its shape.
        dtype: The name of its dtype.
        nbytes: The bytes of its elements; None for a dtype that this version does not know.
        chunks: The boxes that it was saved in.
    """

    key: str
    shape: Ints
    dtype: str
    nbytes: int | None
    chunks: tuple[ChunkInfo, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that wrote it, as far as that is recorded."""
        return tuple(sorted({chunk.rank for chunk in self.chunks if chunk.rank is not None}))


@dataclass(frozen=True)
class ObjectInfo:
    """A value that is not a tensor, as far as it is known without reading it.

    Attributes:
        key: Its flat key.
        nbytes: How many bytes it takes in its file; None if it is stored nowhere.
        file: That file.
        rank: The rank that wrote it; None if that is not recorded.
    """

    key: str
    nbytes: int | None
    file: str | None
    rank: int | None


@dataclass(frozen=True)
class CheckpointMetadata:
    """The facts of a checkpoint as a whole. Facts that its format does not have are None.

    Attributes:
        format: The format and its version: ``holdfast 1.3``, ``torch``, ``torch.save``, ``safetensors``.
        software: What made it.
        created: When.
        world_size: How many ranks took part.
        save_id: The name that the save gave itself.
        saved_as: Where it was saved to, in the words of whoever saved it.
        torch_readable: Whether stock torch reads it.
        block_size: The unit of checksums.
        files: The data files with their sizes.
        user_metadata: What the caller of the save wanted to keep with it.
    """

    format: str
    software: str | None
    created: datetime | None
    world_size: int | None
    save_id: str | None
    saved_as: str | None
    torch_readable: bool
    block_size: int | None
    files: dict[str, int]
    user_metadata: dict[str, Any]


@dataclass(frozen=True)
class VerifyResult:
    """The result of a verification.

    Attributes:
        damages: All that is wrong, by file and place.
        notes: What is worth knowing, and not wrong.
        limits: What could not be checked.
        checked_nbytes: How many bytes were read and compared.
    """

    damages: list[Damage]
    notes: list[str]
    limits: list[str]
    checked_nbytes: int

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.damages

    def __bool__(self) -> bool:
        return self.ok


def metadata_of(part: Inventory) -> CheckpointMetadata:
    """The facts of a checkpoint as a whole."""
    created = part.created_ns and datetime.fromtimestamp(part.created_ns / 1e9, timezone.utc)
    return CheckpointMetadata(
        part.format,
        part.software,
        created or None,
        part.world_size,
        part.save_id,
        part.checkpoint_id,
        part.torch_readable,
        part.block_size,
        dict(part.files),
        dict(part.user_metadata),
    )


def info_of(part: Inventory, entry: TensorEntry | ObjectEntry) -> TensorInfo | ObjectInfo:
    """The facts of one key."""
    if isinstance(entry, ObjectEntry):
        item = entry.item
        if item is None:
            return ObjectInfo(entry.key, None, None, part.rank)
        return ObjectInfo(entry.key, item.length, item.relative_path, _rank_of(part, item))
    chunks = tuple(_chunk_info(part, chunk) for chunk in entry.chunks)
    return TensorInfo(entry.key, entry.shape, entry.dtype, entry.nbytes, chunks)


def _chunk_info(part: Inventory, chunk: StoredChunk) -> ChunkInfo:
    item = chunk.item
    if item is None:
        return ChunkInfo(chunk.offsets, chunk.lengths, None, None, None, part.rank)
    place = item.relative_path, item.offset, item.length, _rank_of(part, item)
    return ChunkInfo(chunk.offsets, chunk.lengths, *place, tuple(item.transform_descriptors or ()))


def _rank_of(part: Inventory, item: StorageInfo) -> int | None:
    file = parse_data_file(item.relative_path)
    return file.rank if part.rank is None and file else part.rank


def _rows(part: Inventory) -> Iterator[tuple[str, str, str, str]]:
    for entry in part.entries[:_MOST_SHOWN]:
        if isinstance(entry, ObjectEntry):
            yield entry.key, "object", "", size_text(entry.item.length if entry.item else None)
        else:
            yield entry.key, entry.dtype, shape_text(entry.shape), size_text(entry.nbytes)


def _totals(part: Inventory) -> str:
    tensors = part.tensors
    size = size_text(sum(entry.nbytes or 0 for entry in tensors))
    return f"{part.format}: {len(tensors):,} tensors, {size}; {len(part.objects):,} objects"


def as_text(url: str, part: Inventory) -> str:
    """The checkpoint as ``repr`` shows it: what it is, and its first keys."""
    rows = list(_rows(part))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    more = len(part.entries) - len(rows)
    return "\n".join(
        [f"<CheckpointView {url!r}, {_totals(part)}>", *lines, *([f"  and {more:,} more"] if more else [])]
    )


def as_html(url: str, part: Inventory) -> str:
    """The checkpoint as a notebook shows it."""
    rows = [
        f"<tr><td style='text-align:left'><code>{html.escape(key)}</code></td><td>{html.escape(dtype)}</td>"
        f"<td>{shape}</td><td>{size}</td></tr>"
        for key, dtype, shape, size in _rows(part)
    ]
    more = len(part.entries) - len(rows)
    last = f"<tr><td colspan='4' style='text-align:left'>and {more:,} more</td></tr>" if more else ""
    return (
        f"<div><b>{html.escape(url)}</b><br>{html.escape(_totals(part))}<table><thead><tr>"
        "<th style='text-align:left'>key</th><th>dtype</th><th>shape</th><th>size</th></tr></thead><tbody>"
        f"{''.join(rows)}{last}</tbody></table></div>"
    )
