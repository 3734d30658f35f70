"""``holdfast verify``: reads every byte of a checkpoint, and names all that is not as it was saved."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict

from holdfast._any_format import open_checkpoint
from holdfast._contents.findings import Damage, Findings
from holdfast._contents.inventory import Inventory
from holdfast._contents.verifying import check_checkpoint, limits
from holdfast._human_units import some_of
from holdfast.cli.exit_codes import DAMAGED, FINE, run_each
from holdfast.cli.text import Style, counted, printable, size_text, write_json, write_lines

__all__ = ["run", "where_text"]

_MOST_THREADS = 4


def run(arguments: argparse.Namespace) -> int:
    """Check everything, print what was found, and return the exit code."""
    return run_each(arguments.paths, lambda path: _verify(path, arguments))


def _verify(path: str, arguments: argparse.Namespace) -> int:
    report = Findings()
    is_shown = Style(sys.stderr).is_terminal and not (arguments.quiet or arguments.json)
    parts = check_checkpoint(open_checkpoint(path), report, threads=arguments.threads, progress=is_shown)
    damages = report.sorted_damages()
    if arguments.json:
        write_json(_document(path, parts, report, damages))
    else:
        many = len(arguments.paths) > 1
        write_lines(_lines(path, parts, report, damages, quiet=arguments.quiet, many=many))
    return DAMAGED if damages else FINE


def _document(
    path: str, parts: list[Inventory], report: Findings, damages: list[Damage]
) -> dict[str, object]:
    return {
        "schema": "holdfast.verify/1",
        "path": path,
        "ok": not damages,
        "written_by": sorted({part.source for part in parts}),
        "files": sum(len(part.files) for part in parts),
        "items": sum(part.item_count for part in parts),
        "checked_nbytes": report.checked_nbytes,
        "damage": [asdict(damage) for damage in damages],
        "notes": report.notes,
        "limits": limits(parts, report),
    }


def _lines(
    path: str, parts: list[Inventory], report: Findings, damages: list[Damage], *, quiet: bool, many: bool
) -> Iterator[str]:
    style = Style(sys.stdout)
    for damage in damages:
        where = f"{path}: {where_text(damage)}" if many else where_text(damage)
        yield f"{style.bad('damaged')}  {printable(where)}: {printable(damage.message)}"
    if quiet:
        return
    for note in report.notes:
        yield f"{style.bold('note')}     {printable(note)}"
    for limit in limits(parts, report):
        yield f"{style.bold('limit')}    {printable(limit)}"
    files = sum(len(part.files) for part in parts)
    items = sum(part.item_count for part in parts)
    what = f"{counted(items, 'item')} in {counted(files, 'data file')}"
    verdict = style.bad("DAMAGED") if damages else style.good(_verdict(report))
    yield f"{printable(path)}: {verdict}: {what}, {size_text(report.checked_nbytes)} checked"


def _verdict(report: Findings) -> str:
    """The verdict on a checkpoint in which nothing is damaged."""
    if not report.unchecked:
        return "sound"
    return "sound as far as it could be checked" if report.checked_nbytes else "complete, content not checked"


def where_text(damage: Damage) -> str:
    """Where a damage is: file, place and keys, as far as they are known."""
    words = [] if damage.rank is None else [f"rank {damage.rank}"]
    if damage.file is not None:
        words.append(damage.file)
    if damage.offset is not None and damage.nbytes is not None:
        words.append(f"bytes {damage.offset:,} to {damage.offset + damage.nbytes:,}")
    if damage.keys:
        words.append(("key " if len(damage.keys) == 1 else "keys ") + some_of(damage.keys, 3))
    return ", ".join(words)
