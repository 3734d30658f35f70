"""``holdfast trace``: what the save of a checkpoint did, by phase and rank."""

import argparse
import dataclasses
import json
from collections.abc import Iterator

from holdfast._contents.opening import LARGEST_METADATA, Checkpoint, SafetensorsModel, find_checkpoint
from holdfast._format import manifest, metadata_file
from holdfast._format.stored_record import open_record
from holdfast._human_units import rate_text, seconds_text, size_text
from holdfast._record_outputs.chrome_trace import chrome_trace
from holdfast._transfer_record import PhaseSummary, TransferRecord, summarize
from holdfast.cli.exit_codes import FINE
from holdfast.cli.text import aligned, counted, printable, write_json, write_lines
from holdfast.errors import CheckpointNotFoundError

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Print the record of the save, or write it as a trace, and return the exit code."""
    record = _read_record(find_checkpoint(arguments.path), arguments.path)
    if arguments.output is not None:
        with open(arguments.output, "w", encoding="utf-8") as file:
            json.dump(chrome_trace(record), file)
    if arguments.json:
        write_json({"schema": "holdfast.trace/1", "path": arguments.path, "record": record.as_dict()})
    else:
        write_lines(_lines(arguments.path, record))
        if arguments.output is not None:
            write_lines([f"trace: {printable(arguments.output)} (open it in Perfetto, or chrome://tracing)"])
    return FINE


def _read_record(checkpoint: Checkpoint, path: str) -> TransferRecord:
    """The record of a checkpoint. Parts that ranks saved each for itself become one.

    Raises:
        CheckpointNotFoundError: There is no record.
    """
    found: list[TransferRecord] = []
    is_model = isinstance(checkpoint, SafetensorsModel)
    for _, name in [] if is_model else checkpoint.metadata_names:
        where = f"{checkpoint.store.url}/{name}"
        stored = metadata_file.split(
            checkpoint.store.read(name, max_bytes=LARGEST_METADATA), path=where
        ).manifest
        described = None if stored is None else manifest.decode(stored, path=where)
        if described is not None and described.record is not None:
            found.append(open_record(described.record, described.checkpoint_id or path))
    if not found:
        raise CheckpointNotFoundError(
            f"{path}: has no record of its save: something else than holdfast wrote it, or an older version",
            path=path,
        )
    return found[0] if len(found) == 1 else _together(found)


def _together(parts: list[TransferRecord]) -> TransferRecord:
    first = min(parts, key=lambda part: part.started_at)
    rows = [
        dataclasses.replace(row, start=row.start + part.started_at - first.started_at)
        for part in parts
        for row in part.ranks
    ]
    return dataclasses.replace(
        first,
        world_size=len(rows),
        seconds=max(row.start + row.seconds for row in rows),
        nbytes=sum(part.nbytes for part in parts),
        phases=summarize(rows),
        ranks=rows,
    )


def _lines(path: str, record: TransferRecord) -> Iterator[str]:
    yield (
        f"{printable(path)}: {size_text(record.nbytes)} by {counted(record.world_size, 'rank')} in "
        f"{seconds_text(record.seconds)} ({rate_text(record.rate)}) until the commit; the trainer waited "
        f"{seconds_text(record.stall)}"
    )
    rows = [("phase", "size", "busy: median", "longest", "slowest rank", "longest wait for others")]
    rows += [_row(phase) for phase in record.phases]
    yield from aligned(rows, right=range(1, 6))
    slowest = record.slowest
    if record.world_size > 1 and slowest is not None:
        yield f"slowest: rank {slowest.rank} in {slowest.phase!r}, {seconds_text(slowest.seconds)}"
    for name, count in record.events.items():
        yield f"{count} x {printable(name)}"


def _row(phase: PhaseSummary) -> tuple[str, str, str, str, str, str]:
    return (
        printable(phase.name),
        size_text(phase.nbytes) if phase.nbytes else "",
        seconds_text(phase.median),
        seconds_text(phase.longest),
        str(phase.slowest_rank),
        seconds_text(phase.waited),
    )
