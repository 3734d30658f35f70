"""Owns how parts that ranks saved each for itself stand on one page: side by side, never merged."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from holdfast._contents.inventory import Inventory, ObjectEntry, TensorEntry
from holdfast._format.dtypes import DTYPES
from holdfast._transfer_record import TransferRecord, summarize

__all__ = ["join_parts", "joined_record"]


def join_parts(parts: Sequence[Inventory]) -> Inventory:
    """One inventory of all parts. Keys of a rank's own part begin with that rank.

    Args:
        parts: What the metadata files of a checkpoint say; at least one.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    return dataclasses.replace(
        first,
        rank=None,
        nbytes=sum(part.nbytes for part in parts),
        world_size=len(parts) if first.world_size is None else first.world_size,
        entries=[_named(entry, part.rank) for part in parts for entry in part.entries],
        files={name: nbytes for part in parts for name, nbytes in part.files.items()},
        record=joined_record(part.record for part in parts),
        _steps=None,
    )


def _named(entry: TensorEntry | ObjectEntry, rank: int | None) -> TensorEntry | ObjectEntry:
    key = f"rank {rank}.{entry.key}"
    if isinstance(entry, ObjectEntry):
        return entry._replace(key=key)
    nbytes = entry.nbytes
    if nbytes is not None:
        # Only what this rank has of the tensor.
        elements = sum(math.prod(chunk.lengths) for chunk in entry.chunks)
        nbytes = elements * DTYPES[entry.dtype].itemsize
    return entry._replace(key=key, nbytes=nbytes)


def joined_record(records: Iterable[TransferRecord | None]) -> TransferRecord | None:
    """The records of the parts of a checkpoint as one; None if no part has one."""
    found = [record for record in records if record is not None]
    if len(found) < 2:
        return found[0] if found else None
    first = min(found, key=lambda part: part.started_at)
    rows = [
        dataclasses.replace(row, start=row.start + part.started_at - first.started_at)
        for part in found
        for row in part.ranks
    ]
    return dataclasses.replace(
        first,
        world_size=len(rows),
        seconds=max(row.start + row.seconds for row in rows),
        nbytes=sum(part.nbytes for part in found),
        phases=summarize(rows),
        ranks=rows,
    )
