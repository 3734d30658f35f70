"""Owns how parts that ranks saved each for itself stand on one page: side by side, never merged."""

import dataclasses
import math
from collections.abc import Sequence

from holdfast._contents.inventory import Inventory, ObjectEntry, TensorEntry
from holdfast._format.dtypes import DTYPES
from holdfast.cli.save_record import joined_record

__all__ = ["join_parts"]


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
