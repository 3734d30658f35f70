"""``holdfast report``: a checkpoint, or the steps of a run, as one HTML page."""

import argparse
import sys

from holdfast._any_format import open_checkpoint
from holdfast._contents.findings import Findings
from holdfast._contents.opening import Checkpoint
from holdfast._contents.verifying import check_checkpoint, limits
from holdfast.cli.exit_codes import DAMAGED, FINE, check_output
from holdfast.cli.pages.checkpoint_page import Integrity, checkpoint_page
from holdfast.cli.pages.joined_parts import join_parts
from holdfast.cli.pages.run_page import run_page
from holdfast.cli.prune import keep_policy
from holdfast.cli.run_steps import open_root
from holdfast.cli.run_summary import RunStep, policy_text, summarize_run
from holdfast.cli.summary import summarize
from holdfast.cli.text import Style, printable, size_text, write_json, write_lines
from holdfast.cli.verify import where_text
from holdfast.errors import CheckpointNotFoundError, UsageError

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Write the page, and return the exit code: damaged if the page tells of damage."""
    check_output(arguments.output)
    try:
        checkpoint = open_checkpoint(arguments.path)
    except CheckpointNotFoundError:
        steps = _steps_below(arguments)
        if not steps:
            raise
        return _report_run(arguments, steps)
    if keep_policy(arguments) is not None:
        raise UsageError(
            f"{arguments.path} is a checkpoint: --last, --every, --within, --steps and --best are for the "
            "folder of a run"
        )
    part = join_parts(list(checkpoint.parts()))
    summary = summarize(part, checkpoint.store, checkpoint.sizes(part))
    wrong = [f"{file['name']}: {file['state']}" for file in summary["files"] if file["state"] != "present"]
    integrity = _verified(checkpoint, arguments) if arguments.verify else Integrity(wrong)
    _write(arguments, checkpoint_page(arguments.path, part, summary, integrity), integrity)
    return DAMAGED if integrity.wrong else FINE


def _steps_below(arguments: argparse.Namespace) -> list[RunStep]:
    """The steps of a run whose root was named; none if it is no root."""
    try:
        return summarize_run(open_root(arguments.path, arguments.name), keep_policy(arguments))
    except CheckpointNotFoundError:
        return []


def _report_run(arguments: argparse.Namespace, steps: list[RunStep]) -> int:
    if arguments.verify:
        raise UsageError(
            f"{arguments.path} is a run: --verify is for one checkpoint, such as one of its steps"
        )
    policy = keep_policy(arguments)
    wrong = [
        f"{one.step.folder}: a restore found it damaged"
        for one in steps
        if one.step.commit and one.step.is_damaged
    ]
    page = run_page(arguments.path, steps, None if policy is None else policy_text(policy))
    _write(arguments, page, Integrity(wrong))
    return DAMAGED if wrong else FINE


def _verified(checkpoint: Checkpoint, arguments: argparse.Namespace) -> Integrity:
    found = Findings()
    is_shown = Style(sys.stderr).is_terminal and not arguments.json
    parts = check_checkpoint(checkpoint, found, progress=is_shown)
    return Integrity(
        wrong=[f"{where_text(damage)}: {damage.message}" for damage in found.sorted_damages()],
        notes=[*found.notes, *limits(parts, found)],
        checked_nbytes=found.checked_nbytes,
        unchecked=sum(found.unchecked.values()),
    )


def _write(arguments: argparse.Namespace, page: str, integrity: Integrity) -> None:
    """Write the page, and print where it is."""
    # Names of strangers may have halves of characters, which no file can have.
    data = page.encode("utf-8", "backslashreplace")
    with open(arguments.output, "wb") as file:
        file.write(data)
    if arguments.json:
        write_json(
            {
                "schema": "holdfast.report/1",
                "path": arguments.path,
                "output": arguments.output,
                "nbytes": len(data),
                "verified": integrity.checked_nbytes is not None,
                "unchecked": integrity.unchecked,
                "wrong": integrity.wrong,
            }
        )
        return
    lines = [f"damaged  {printable(one)}" for one in integrity.wrong]
    lines.append(f"{printable(arguments.path)}: {printable(arguments.output)}, {size_text(len(data))}")
    write_lines(lines)
