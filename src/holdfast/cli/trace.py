"""``holdfast trace``: what the save of a checkpoint did, by phase and rank."""

import argparse
import json
from collections.abc import Iterator

from holdfast._any_format import open_checkpoint
from holdfast._human_units import rate_text, seconds_text, size_text
from holdfast._record_outputs.chrome_trace import chrome_trace
from holdfast._transfer_record import PhaseSummary, TransferRecord
from holdfast.cli.exit_codes import FINE, check_output
from holdfast.cli.pages.joined_parts import joined_record
from holdfast.cli.text import aligned, counted, printable, write_json, write_lines
from holdfast.errors import CheckpointNotFoundError

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Print the record of the save, or write it as a trace, and return the exit code."""
    path = arguments.path
    if arguments.output is not None:
        check_output(arguments.output)
    record = joined_record(part.record for part in open_checkpoint(path).parts())
    if record is None:
        raise CheckpointNotFoundError(
            f"{path}: has no record of its save: something else than holdfast wrote it, or an older version",
            path=path,
        )
    if arguments.output is not None:
        with open(arguments.output, "w", encoding="utf-8") as file:
            json.dump(chrome_trace(record), file)
    if arguments.json:
        write_json({"schema": "holdfast.trace/1", "path": path, "record": record.as_dict()})
    else:
        write_lines(_lines(path, record))
        if arguments.output is not None:
            write_lines([f"trace: {printable(arguments.output)} (open it in Perfetto, or chrome://tracing)"])
    return FINE


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
