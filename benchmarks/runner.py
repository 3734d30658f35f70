"""Runs cases, each in a process and a folder of its own, and leaves nothing behind."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.case import Case
from benchmarks.cgroups import remove_groups_of
from benchmarks.machine import Busyness
from benchmarks.results import CaseResult, rows_of

__all__ = ["NoSpaceError", "check_space", "run_all", "scratch_folder"]

_ROOT = Path(__file__).parent.parent


class NoSpaceError(Exception):
    """The disk cannot hold what the cases write."""


def check_space(cases: Sequence[Case], folder: Path) -> None:
    """Raise NoSpaceError unless the largest case fits with a tenth to spare; one runs at a time."""
    if not cases:
        return
    largest = max(cases, key=lambda case: case.disk_nbytes)
    needed, free = int(1.1 * largest.disk_nbytes), shutil.disk_usage(folder).free
    if free < needed:
        raise NoSpaceError(
            f"{folder} has {free / 1e9:.1f} GB free and the case {largest.name} needs {needed / 1e9:.1f} GB. "
            "Give a folder on another disk with --folder, smaller sizes with --scale, or other cases with "
            "--only."
        )


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A new folder in ``parent``, removed whatever happens in between."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=parent.resolve()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_all(
    cases: Sequence[Case], *, scale: float, rounds: int | None, folder: Path, say: Callable[[str], None]
) -> list[CaseResult]:
    """Run cases one after the other; one that fails does not keep the others from running.

    Args:
        cases: Which.
        scale: What their sizes were multiplied by.
        rounds: For each of them; None for each its own number.
        folder: Where their files go.
        say: Gets lines of progress.
    """
    results = []
    for number, case in enumerate(cases, 1):
        say(f"[{number}/{len(cases)}] {case.name}: {case.title}")
        with scratch_folder(folder) as own:
            results.append(_run_apart(case, scale, rounds or case.rounds, own))
    return results


def _run_to_its_end(command: list[str]) -> tuple[int, bytes]:
    """Its exit status and output. Interrupted, it ends the process with all that it started."""
    # A session of its own is a group of its own: none of it goes on writing into a folder being removed.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=_ROOT, start_new_session=True)
    try:
        output, _ = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        remove_groups_of(process.pid)
        raise
    return process.returncode, output


def _run_apart(case: Case, scale: float, rounds: int, folder: Path) -> CaseResult:
    command = [sys.executable, "-m", "benchmarks.worker", case.name, str(scale), str(rounds), str(folder)]
    watch, start, load = Busyness(), time.monotonic(), os.getloadavg()[0]
    status, output = _run_to_its_end(command)
    found: dict[str, Any] = msgspec.json.decode(output) if status == 0 else {}
    samples = found.get("samples")
    return CaseResult(
        case.name,
        case.title,
        rows=rows_of(case.quantities, samples) if samples else [],
        note=case.note,
        skipped=found.get("skipped"),
        failed=None if status == 0 else f"its process ended with status {status}",
        seconds=round(time.monotonic() - start, 1),
        load_average=(load, os.getloadavg()[0]),
        others=watch.cores_of_others(),
        absent=found.get("absent", {}),
    )
