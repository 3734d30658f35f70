"""The folder of a run: its steps, each with its time, its size, and whether it is complete."""

import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

from holdfast._format.names import METADATA, describe_data_files, metadata_rank
from holdfast._format.safetensors import SUFFIX
from holdfast._io import pool
from holdfast._io.store import FileFacts
from holdfast._steps.run_root import RunRoot
from holdfast._steps.step_list import Step, describe_steps
from holdfast._steps.step_names import StepNames, guess_names
from holdfast.cli.run_steps import UNREADABLE, notes_of, state_of, time_of, time_text
from holdfast.cli.text import Style, aligned, counted, printable, size_text, write_json, write_lines
from holdfast.errors import UsageError

__all__ = ["find_run", "write_run"]


def find_run(path: str) -> list[dict[str, Any]]:
    """The checkpoints in folders of a place, the newest step last; empty if there are none."""
    root = RunRoot(path, StepNames())
    try:
        below = root.store.below(METADATA)
    except (UsageError, FileNotFoundError, NotADirectoryError):
        return []
    names = guess_names(below.folders)
    steps = {step.folder: step for step in describe_steps(root.store, names, below)}
    folders = [*(name for name in below.folders if name not in steps), *steps]
    jobs = [partial(_describe, root, name, steps.get(name), below.folders[name]) for name in folders]
    found = pool.run(jobs, threads=root.store.traits.requests_in_flight)
    return [row for row in found if row is not None]


def _describe(root: RunRoot, name: str, step: Step | None, commit: FileFacts | None) -> dict[str, Any] | None:
    """The row of a folder; None if nothing of a checkpoint is in it."""
    try:
        files = root.open_step(name).list()
    except PermissionError:
        if step is None:  # such as lost+found
            return None
        files = {}
    is_complete = commit is not None or _is_complete(files)
    if not is_complete and step is None and not describe_data_files(files):
        return None
    return {
        "folder": name,
        "step": step.number if step is not None else None,
        "saved": time_of(commit),
        "nbytes": sum(files.values()),
        "files": len(files),
        "complete": is_complete,
        "state": _state(step, files),
    }


def _is_complete(files: Iterable[str]) -> bool:
    return any(name == METADATA or metadata_rank(name) is not None or name.endswith(SUFFIX) for name in files)


def _state(step: Step | None, files: Iterable[str]) -> str:
    if not _is_complete(files):
        return UNREADABLE if step is not None and step.unseen else "incomplete"
    if METADATA not in files and any(name.endswith(SUFFIX) for name in files):
        return "complete, safetensors"
    if step is None or step.commit is None:  # of single ranks, or in a folder of another name
        return "complete"
    return ", ".join([state_of(step), *notes_of(step)])


def write_run(path: str, rows: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print the checkpoints of a run, as a table or as JSON."""
    if as_json:
        write_json({"schema": "holdfast.ls-run/1", "path": path, "checkpoints": rows})
        return
    style = Style(sys.stdout)
    cells = [
        (
            printable(row["folder"]),
            time_text(row["saved"]),
            size_text(row["nbytes"]),
            row["state"],
        )
        for row in rows
    ]
    lines = aligned(cells, right=(2,))
    is_sound = [row["state"].startswith("complete") for row in rows]
    shown = [line if sound else style.bad(line) for line, sound in zip(lines, is_sound, strict=True)]
    size = size_text(sum(row["nbytes"] for row in rows))
    damaged = sum(row["state"] == "damaged" for row in rows)
    complete = f"{sum(row['complete'] for row in rows) - damaged:,} complete"
    states = f"{complete}, {damaged:,} damaged" if damaged else complete
    write_lines([*shown, style.dim(f"{counted(len(rows), 'checkpoint')}, {states}, {size}")])
