"""Owns the verification of a checkpoint: every byte is read, and all that is wrong is collected."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence

from holdfast._contents.checking_torch import LIMITS
from holdfast._contents.findings import Findings, says_damaged
from holdfast._contents.inventory import Inventory
from holdfast._contents.opening import Checkpoint
from holdfast._format.names import METADATA, is_leftover, metadata_rank, parse_data_file
from holdfast._human_units import size_text
from holdfast._io import pool
from holdfast.errors import CheckpointError
from holdfast.progress_display import ProgressOption, tracking

_MOST_THREADS = 4


def check_checkpoint(
    checkpoint: Checkpoint,
    report: Findings,
    *,
    threads: int | None = None,
    progress: ProgressOption = None,
) -> list[Inventory]:
    """Read every byte of a checkpoint.

    Args:
        checkpoint: Where it is.
        report: Takes what is found.
        threads: How many threads read; None for a few.
        progress: How far it is, as for ``holdfast.load``.

    Returns:
        The parts whose metadata could be read.
    """
    found = [_read_part(checkpoint, rank, name, report) for rank, name in checkpoint.metadata_names]
    parts = [part for part in found if part is not None]
    jobs = [job for part in parts for job in checkpoint.check_jobs(part, report)]
    if parts and parts[0].source in ("holdfast", "torch"):
        for note in _unused_files(checkpoint, parts, checkpoint.sizes(*parts)):
            report.note(note)
    with tracking(progress, f"checking {checkpoint.url}") as tracker:
        if tracker is not None:
            tracker.begin(sum(nbytes for part in parts for nbytes in part.files.values()))
            report.on_progress = tracker.advance
        pool.run(
            [_guarded(job, report) for job in jobs],
            threads=threads or min(_MOST_THREADS, os.cpu_count() or 1),
        )
    return parts


def limits(parts: Sequence[Inventory], report: Findings) -> list[str]:
    """What could not be checked, in words."""
    found = [LIMITS] if any(part.source == "torch" for part in parts) else []
    return found + [
        f"{count:,} {'item' if count == 1 else 'items'} not checked: {why}"
        for why, count in report.unchecked.items()
    ]


def _read_part(checkpoint: Checkpoint, rank: int | None, name: str, report: Findings) -> Inventory | None:
    try:
        return checkpoint.read(rank, name)
    except CheckpointError as error:
        if not says_damaged(error):
            raise
        has_others = name == METADATA or metadata_rank(name) is not None
        message = f"{error} The data files that it names could not be checked." if has_others else str(error)
        report.damage("metadata", message, file=name or os.path.basename(checkpoint.url), rank=rank)
    return None


def _guarded(job: Callable[[], None], report: Findings) -> Callable[[], None]:
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


def _unused_files(checkpoint: Checkpoint, parts: list[Inventory], sizes: dict[str, int]) -> Iterator[str]:
    """A sentence for each file in the folder that looks like a checkpoint's and belongs to none.

    Nothing is said where the metadata could not be read, as nobody knows then what belongs to it.
    """
    if len(parts) < len(checkpoint.metadata_names):
        return
    used = {name for part in parts for name in part.files} | {name for _, name in checkpoint.metadata_names}
    for name in sorted(sizes.keys() - used):
        data = parse_data_file(name)
        if checkpoint.only_rank is not None and not (data and data.rank == checkpoint.only_rank):
            continue
        if data or is_leftover(name) or metadata_rank(name) is not None:
            yield f"{name} ({size_text(sizes[name])}) is not part of this checkpoint: left by another save"
