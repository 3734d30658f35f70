"""``holdfast report``: a checkpoint as one HTML page."""

import argparse
import sys

from holdfast._contents.findings import Report
from holdfast._contents.opening import Checkpoint, find_checkpoint
from holdfast.cli.exit_codes import DAMAGED, FINE
from holdfast.cli.pages.checkpoint_page import Integrity, checkpoint_page
from holdfast.cli.pages.joined_parts import join_parts
from holdfast.cli.summary import summarize
from holdfast.cli.text import Style, printable, size_text, write_json, write_lines
from holdfast.cli.verify import check_checkpoint, limits, where_text

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Write the page, and return the exit code: damaged if the page tells of damage."""
    checkpoint = find_checkpoint(arguments.path)
    part = join_parts(list(checkpoint.parts()))
    summary = summarize(part, checkpoint.store, checkpoint.store.list())
    wrong = [f"{file['name']}: {file['state']}" for file in summary["files"] if file["state"] != "present"]
    integrity = _verified(checkpoint, arguments) if arguments.verify else Integrity(wrong)
    # Names of strangers may have halves of characters, which no file can have.
    page = checkpoint_page(arguments.path, part, summary, integrity).encode("utf-8", "backslashreplace")
    with open(arguments.output, "wb") as file:
        file.write(page)
    _tell(arguments, len(page), integrity)
    return DAMAGED if integrity.wrong else FINE


def _verified(checkpoint: Checkpoint, arguments: argparse.Namespace) -> Integrity:
    found = Report()
    is_shown = Style(sys.stderr).is_terminal and not arguments.json
    parts = check_checkpoint(checkpoint, found, show_progress=is_shown)
    return Integrity(
        wrong=[f"{where_text(damage)}: {damage.message}" for damage in found.sorted_damages()],
        notes=[*found.notes, *limits(parts, found)],
        checked_nbytes=found.checked_nbytes,
    )


def _tell(arguments: argparse.Namespace, nbytes: int, integrity: Integrity) -> None:
    if arguments.json:
        write_json(
            {
                "schema": "holdfast.report/1",
                "path": arguments.path,
                "output": arguments.output,
                "nbytes": nbytes,
                "verified": integrity.checked_nbytes is not None,
                "wrong": integrity.wrong,
            }
        )
        return
    lines = [f"damaged  {printable(one)}" for one in integrity.wrong]
    lines.append(f"{printable(arguments.path)}: {printable(arguments.output)}, {size_text(nbytes)}")
    write_lines(lines)
