"""``holdfast show``: what a checkpoint is, on one page."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from holdfast._any_format import open_checkpoint
from holdfast.cli.exit_codes import DAMAGED, FINE, run_each
from holdfast.cli.summary import summarize
from holdfast.cli.text import Style, aligned, counted, printable, size_text, write_json, write_lines

__all__ = ["run"]

_MOST_FILES = 20
_INDENT = " " * 14
_MAKERS = {
    "holdfast": "holdfast",
    "torch": "torch.distributed.checkpoint (it does not record its version)",
    "torch.save": "torch.save (it does not record its version)",
    "safetensors": "not recorded (safetensors files)",
}


def run(arguments: argparse.Namespace) -> int:
    """Print what the checkpoint is, and return the exit code: damaged if a file is missing or cut off."""
    return run_each(arguments.paths, lambda path: _show(path, arguments))


def _show(path: str, arguments: argparse.Namespace) -> int:
    checkpoint = open_checkpoint(path)
    found = list(checkpoint.parts())
    sizes = checkpoint.sizes(*found)
    parts = [summarize(part, checkpoint.store, sizes) for part in found]
    if arguments.json:
        write_json({"schema": "holdfast.show/1", "path": path, "parts": parts})
    else:
        for number, part in enumerate(parts):
            lines = list(_lines(path, part, list_all=arguments.all))
            write_lines(["", *lines] if number or path != arguments.paths[0] else lines)
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
    metadata = part["metadata"]
    rows = [(metadata["name"], size_text(metadata["nbytes"]), "")] if metadata["name"] else []
    rows += [(printable(file["name"]), size_text(file["nbytes"]), _state(file)) for file in shown]
    for line, (_, _, wrong) in zip(aligned(rows, right=(1,)), rows, strict=True):
        yield f"{_INDENT}{style.bad(line) if wrong else line}"
    if len(shown) < len(files):
        yield f"{_INDENT}and {len(files) - len(shown):,} more (--all lists them)"


def _facts(part: dict[str, Any]) -> dict[str, str]:
    blocks = f", a CRC-32 for every {size_text(part['block_size'])}" if part["block_size"] else ""
    stored = sum(file["nbytes"] or 0 for file in part["files"]) + part["metadata"]["nbytes"]
    when = (part["created"] or "not recorded").replace("T", " ").replace("Z", " UTC")
    is_file_time = part["created"] is not None and part["created_source"] == "file time"
    chunks = counted(part["chunks"], "chunk")
    files = len(part["files"]) + bool(part["metadata"]["name"])
    return {
        "made by": printable(part["software"] or _MAKERS[part["written_by"]]),
        "saved": when + (" (by the file's time)" if is_file_time else ""),
        "saved as": printable(part["checkpoint_id"] or "not recorded"),
        "save id": printable(part["save_id"] or "not recorded"),
        "world size": _world_size(part),
        "format": printable(part["format"]) + blocks,
        "torch": _torch(part),
        "transforms": _transforms(part),
        "objects": f"{counted(part['objects'], 'object')}, {size_text(part['object_nbytes'])}",
        "tensors": f"{counted(part['tensors'], 'tensor')} in {chunks}, {size_text(part['tensor_nbytes'])}",
        "files": f"{counted(files, 'file')}, {size_text(stored)}",
        **({"kept": printable(str(part["user_metadata"]))} if part["user_metadata"] else {}),
    }


def _world_size(part: dict[str, Any]) -> str:
    if part["world_size"] is not None:
        return f"{part['world_size']:,}"
    if part["ranks_with_data"] == 0:
        return "not recorded"
    return f"not recorded; {counted(part['ranks_with_data'], 'rank')} wrote data"


def _torch(part: dict[str, Any]) -> str:
    if part["written_by"] in ("torch", "torch.save"):
        return "wrote it, and can read it"
    if part["written_by"] == "safetensors":
        return "can read it with HuggingFaceStorageReader"
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
