"""The folder of a run: its steps, each with its time, its size, and whether it is complete."""

import sys
import time
from functools import partial
from typing import Any

from holdfast._format.names import METADATA, describe_data_files, metadata_rank
from holdfast._format.safetensors import SUFFIX
from holdfast._io import pool
from holdfast._io.places import open_place
from holdfast._io.store import FileFacts
from holdfast._steps.step_list import Step, describe_steps
from holdfast._steps.step_names import guess_names
from holdfast.cli.text import Style, aligned, counted, printable, size_text, write_json, write_lines
from holdfast.errors import UsageError

__all__ = ["find_run", "write_run"]


def find_run(path: str) -> list[dict[str, Any]]:
    """The checkpoints in folders of a place, the newest step last; empty if there are none."""
    root = open_place(path.rstrip("/") or "/")
    try:
        below = root.below(METADATA)
    except (UsageError, FileNotFoundError, NotADirectoryError):
        return []
    names = guess_names(below.folders)
    steps = {step.folder: step for step in describe_steps(root, names, below.files, below.folders)}
    folders = [name for name in below.folders if name not in steps]
    jobs = [
        partial(_describe, path, name, steps.get(name), below.folders[name]) for name in [*folders, *steps]
    ]
    found = pool.run(jobs, threads=root.traits.requests_in_flight)
    return [row for row in found if row["state"] != "no checkpoint"]


def _describe(path: str, name: str, step: Step | None, commit: FileFacts | None) -> dict[str, Any]:
    files = open_place(f"{path.rstrip('/')}/{name}").list()
    saved = commit.modified_ns if commit is not None else None
    return {
        "folder": name,
        "step": step.number if step is not None else None,
        "saved": saved and time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(saved // 1_000_000_000)),
        "nbytes": sum(files.values()),
        "files": len(files),
        "complete": commit is not None or _is_complete(files),
        "state": _state(step, files),
    }


def _is_complete(files: dict[str, int]) -> bool:
    return any(name == METADATA or metadata_rank(name) is not None or name.endswith(SUFFIX) for name in files)


def _state(step: Step | None, files: dict[str, int]) -> str:
    if not _is_complete(files):
        return "not complete" if step is not None or describe_data_files(files) else "no checkpoint"
    if METADATA not in files and any(name.endswith(SUFFIX) for name in files):
        return "complete, safetensors"
    if step is not None and step.is_damaged:
        return "damaged"
    pinned = ["pinned"] if step is not None and step.is_pinned else []
    left = ["of an earlier try"] if step is not None and step.is_abandoned else []
    return ", ".join(["complete", *pinned, *left])


def write_run(path: str, rows: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print the checkpoints of a run, as a table or as JSON."""
    if as_json:
        write_json({"schema": "holdfast.ls-run/1", "path": path, "checkpoints": rows})
        return
    style = Style(sys.stdout)
    cells = [
        (
            printable(row["folder"]),
            (row["saved"] or "").replace("T", " ").replace("Z", " UTC"),
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
