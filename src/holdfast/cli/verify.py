"""``holdfast verify``: reads every byte of a checkpoint, and names all that is not as it was saved."""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict

from holdfast._contents.checking_parts import part_jobs, unused_files
from holdfast._contents.checking_torch import LIMITS
from holdfast._contents.findings import Damage, Report, shortened
from holdfast._contents.inventory import Inventory
from holdfast._contents.opening import Checkpoint, find_checkpoint
from holdfast._io import pool
from holdfast.cli.exit_codes import DAMAGED, FINE, exit_code
from holdfast.cli.text import Style, counted, printable, size_text, write_json, write_lines
from holdfast.errors import CheckpointError, IntegrityError
from holdfast.progress_display import tracking

__all__ = ["check_checkpoint", "limits", "run", "where_text"]

_MOST_THREADS = 4


def run(arguments: argparse.Namespace) -> int:
    """Check everything, print what was found, and return the exit code."""
    is_shown = Style(sys.stderr).is_terminal and not (arguments.quiet or arguments.json)
    report = Report()
    parts = check_checkpoint(
        find_checkpoint(arguments.path), report, threads=arguments.threads, show_progress=is_shown
    )
    damages = report.sorted_damages()
    if arguments.json:
        write_json(_document(arguments.path, parts, report, damages))
    else:
        write_lines(_lines(arguments, parts, report, damages))
    return DAMAGED if damages else FINE


def check_checkpoint(
    checkpoint: Checkpoint, report: Report, *, threads: int | None = None, show_progress: bool = False
) -> list[Inventory]:
    """Read every byte of a checkpoint.

    Args:
        checkpoint: Where it is.
        report: Takes what is found.
        threads: How many threads read; None for a few.
        show_progress: Whether a bar is drawn.

    Returns:
        The parts whose metadata could be read.
    """
    parts = _read_parts(checkpoint, report)
    sizes = checkpoint.store.list()
    jobs = [job for part in parts for job in part_jobs(checkpoint.store, part, sizes, report)]
    for note in unused_files(checkpoint, parts, sizes):
        report.note(note)
    with tracking(show_progress, f"checking {printable(checkpoint.store.url)}") as tracker:
        if tracker is not None:
            tracker.begin(sum(nbytes for part in parts for nbytes in part.files.values()))
            report.on_progress = tracker.advance
        pool.run(
            [_guarded(job, report) for job in jobs],
            threads=threads or min(_MOST_THREADS, os.cpu_count() or 1),
        )
    return parts


def _read_parts(checkpoint: Checkpoint, report: Report) -> list[Inventory]:
    parts = [_read_part(checkpoint, rank, name, report) for rank, name in checkpoint.metadata_names]
    return [part for part in parts if part is not None]


def _read_part(checkpoint: Checkpoint, rank: int | None, name: str, report: Report) -> Inventory | None:
    try:
        return checkpoint.read(rank, name)
    except IntegrityError as error:
        if exit_code(error) != DAMAGED:
            raise
        message = f"{error} The data files that it names could not be checked."
        report.damage("metadata", message, file=name, rank=rank)
    return None


def _guarded(job: Callable[[], None], report: Report) -> Callable[[], None]:
    """A job whose failure is damage, so that the other jobs go on."""

    def guarded() -> None:
        try:
            job()
        except CheckpointError as error:
            name = os.path.basename(error.path) if error.path else None
            report.damage("unreadable", str(error), file=name)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                raise
            name = os.path.basename(error.filename) if error.filename else None
            report.damage("unreadable", f"it could not be read: {error.strerror}", file=name)

    return guarded


def _document(path: str, parts: list[Inventory], report: Report, damages: list[Damage]) -> dict[str, object]:
    return {
        "schema": "holdfast.verify/1",
        "path": path,
        "ok": not damages,
        "written_by": sorted({part.source for part in parts}),
        "files": sum(len(part.files) for part in parts),
        "items": sum(1 for part in parts for _ in part.items()),
        "checked_nbytes": report.checked_nbytes,
        "damage": [asdict(damage) for damage in damages],
        "notes": report.notes,
        "limits": limits(parts, report),
    }


def limits(parts: list[Inventory], report: Report) -> list[str]:
    """What could not be checked."""
    known = [LIMITS] if any(part.source == "torch" for part in parts) else []
    return known + [f"{counted(count, 'item')} not checked: {why}" for why, count in report.unchecked.items()]


def _lines(
    arguments: argparse.Namespace, parts: list[Inventory], report: Report, damages: list[Damage]
) -> Iterator[str]:
    style = Style(sys.stdout)
    for damage in damages:
        yield f"{style.bad('damaged')}  {printable(where_text(damage))}: {printable(damage.message)}"
    if arguments.quiet:
        return
    for note in report.notes:
        yield f"{style.bold('note')}     {printable(note)}"
    for limit in limits(parts, report):
        yield f"{style.bold('limit')}    {printable(limit)}"
    files = sum(len(part.files) for part in parts)
    items = sum(1 for part in parts for _ in part.items())
    what = f"{counted(items, 'item')} in {counted(files, 'data file')}"
    verdict = style.bad("DAMAGED") if damages else style.good("sound")
    yield f"{printable(arguments.path)}: {verdict}: {what}, {size_text(report.checked_nbytes)} checked"


def where_text(damage: Damage) -> str:
    """Where a damage is: file, place and keys, as far as they are known."""
    words = [] if damage.rank is None else [f"rank {damage.rank}"]
    if damage.file is not None:
        words.append(damage.file)
    if damage.offset is not None and damage.nbytes is not None:
        words.append(f"bytes {damage.offset:,} to {damage.offset + damage.nbytes:,}")
    if damage.keys:
        words.append(("key " if len(damage.keys) == 1 else "keys ") + shortened(damage.keys))
    return ", ".join(words)
