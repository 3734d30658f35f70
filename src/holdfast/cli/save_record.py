"""The record of the save that made a checkpoint, also if ranks saved each for itself."""

import dataclasses
from collections.abc import Iterable

from holdfast._transfer_record import TransferRecord, summarize

__all__ = ["joined_record"]


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
