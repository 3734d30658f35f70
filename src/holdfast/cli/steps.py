"""``holdfast steps``: the steps of a run."""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast._steps.step_list import Step
from holdfast._steps.step_metadata import METRICS
from holdfast.cli.exit_codes import FINE
from holdfast.cli.run_steps import check_is_run, notes_of, open_root, state_of, time_of, time_text
from holdfast.cli.text import aligned, printable, write_json, write_lines

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Print the steps, and return the exit code."""
    root = open_root(arguments.path, arguments.name)
    found = root.find_steps()
    check_is_run(root, found)
    known = root.metadata.of(found.usable, found.files) if arguments.metrics else {}
    metrics = {number: values.get(METRICS, {}) for number, values in known.items()}
    if arguments.json:
        steps = [_described(step, metrics) for step in found]
        write_json({"schema": "holdfast.steps/1", "path": arguments.path, "steps": steps})
    else:
        write_lines(_lines(arguments.path, list(found), metrics))
    return FINE


def _described(step: Step, metrics: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "step": step.number,
        "folder": step.folder,
        "state": state_of(step),
        "saved": time_of(step.commit),
        "pinned": step.is_pinned,
        "abandoned": step.is_abandoned,
        **({"metrics": metrics[step.number]} if step.number in metrics else {}),
    }


def _lines(path: str, steps: list[Step], metrics: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    if not steps:
        yield f"{printable(path)}: no steps"
        return
    rows = [("step", "saved", "state", "")]
    for step in steps:
        notes = notes_of(step)
        notes += [f"{printable(name)}={value:g}" for name, value in metrics.get(step.number, {}).items()]
        rows.append((str(step.number), time_text(time_of(step.commit)), state_of(step), ", ".join(notes)))
    yield from aligned(rows, right=[0])
