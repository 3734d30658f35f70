"""``holdfast show``: what a checkpoint is, on one page."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from holdfast._contents.opening import find_checkpoint
from holdfast.cli.exit_codes import DAMAGED, FINE
from holdfast.cli.summary import summarize
from holdfast.cli.text import Style, aligned, counted, printable, size_text, write_json, write_lines

__all__ = ["run"]

_MOST_FILES = 20
_INDENT = " " * 14


def run(arguments: argparse.Namespace) -> int:
    """Print what the checkpoint is, and return the exit code: damaged if a file is missing or cut off."""
    checkpoint = find_checkpoint(arguments.path)
    sizes = checkpoint.store.list()
    parts = [summarize(part, checkpoint.store, sizes) for part in checkpoint.parts()]
    if arguments.json:
        write_json({"schema": "holdfast.show/1", "path": arguments.path, "parts": parts})
    else:
        for number, part in enumerate(parts):
            lines = list(_lines(arguments.path, part, list_all=arguments.all))
            write_lines(["", *lines] if number else lines)
    whole = all(file["state"] == "present" for part in parts for file in part["files"])
    return FINE if whole else DAMAGED


def _lines(path: str, part: dict[str, Any], *, list_all: bool) -> Iterator[str]:
    style = Style(sys.stdout)
    yield style.bold(printable(path)) + ("" if part["rank"] is None else f", rank {part['rank']}")
    for name, value in _facts(part).items():
        yield f"  {style.dim(name.ljust(12))}{value}"
        if name == "tensors":
            rows = [
                (total["dtype"], counted(total["tensors"], "tensor"), size_text(total["nbytes"]))
                for total in part["dtypes"]
            ]
            yield from (f"{_INDENT}{line}" for line in aligned(rows, right=(1, 2)))
    files = part["files"]
    shown = files if list_all else files[:_MOST_FILES]
    rows = [(part["metadata"]["name"], size_text(part["metadata"]["nbytes"]), "")]
    rows += [(printable(file["name"]), size_text(file["nbytes"]), _state(file)) for file in shown]
    for line, (_, _, wrong) in zip(aligned(rows, right=(1,)), rows, strict=True):
        yield f"{_INDENT}{style.bad(line) if wrong else line}"
    if len(shown) < len(files):
        yield f"{_INDENT}and {len(files) - len(shown):,} more (--all lists them)"


def _facts(part: dict[str, Any]) -> dict[str, str]:
    blocks = f", a CRC-32 for every {size_text(part['block_size'])}" if part["block_size"] else ""
    stored = sum(file["nbytes"] or 0 for file in part["files"]) + part["metadata"]["nbytes"]
    when = (part["created"] or "not recorded").replace("T", " ").replace("Z", " UTC")
    chunks = counted(part["chunks"], "chunk")
    return {
        "made by": printable(
            part["software"] or "torch.distributed.checkpoint (it does not record its version)"
        ),
        "saved": when + (" (by the file's time)" if part["created_source"] == "file time" else ""),
        "saved as": printable(part["checkpoint_id"] or "not recorded"),
        "save id": printable(part["save_id"] or "not recorded"),
        "world size": _world_size(part),
        "format": printable(part["format"]) + blocks,
        "torch": _torch(part),
        "transforms": _transforms(part),
        "objects": f"{counted(part['objects'], 'object')}, {size_text(part['object_nbytes'])}",
        "tensors": f"{counted(part['tensors'], 'tensor')} in {chunks}, {size_text(part['tensor_nbytes'])}",
        "files": f"{counted(len(part['files']) + 1, 'file')}, {size_text(stored)}",
    }


def _world_size(part: dict[str, Any]) -> str:
    if part["world_size"] is not None:
        return f"{part['world_size']:,}"
    return f"not recorded; {counted(part['ranks_with_data'], 'rank')} wrote data"


def _torch(part: dict[str, Any]) -> str:
    if part["written_by"] == "torch":
        return "wrote it, and can read it"
    if not part["torch_readable"]:
        return "cannot read it: it was saved with torch_compatible=False"
    return "can read it, from version 2.6 on"


def _transforms(part: dict[str, Any]) -> str:
    stacks = [
        f"{', then '.join(map(printable, stack['descriptors']))} ({counted(stack['items'], 'item')})"
        for stack in part["transforms"]
    ]
    return "; ".join(stacks) or "none"


def _state(file: dict[str, Any]) -> str:
    if file["state"] in ("present", "missing"):
        return "" if file["state"] == "present" else "missing"
    return f"{file['state']}: expected {file['expected_nbytes']:,} bytes, has {file['nbytes']:,}"
