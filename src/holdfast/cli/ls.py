"""``holdfast ls``: what a checkpoint holds, as a tree, as lines, or as JSON."""

import argparse
import fnmatch
import os
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from holdfast._any_format import open_checkpoint
from holdfast._contents.inventory import Inventory, ObjectEntry, TensorEntry
from holdfast._format.item_table import StorageInfo
from holdfast.cli.exit_codes import FINE, WRONG_USAGE, complain, run_each
from holdfast.cli.small_objects import as_json, read_small, value_text
from holdfast.cli.text import (
    Style,
    aligned,
    counted,
    printable,
    shape_text,
    size_text,
    write_json,
    write_lines,
)
from holdfast.cli.tree import Entry, branches, entry_nbytes, make_tree
from holdfast.errors import CheckpointNotFoundError
from holdfast.per_rank import KEPT, kept_key

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """List the keys, and return the exit code."""
    others = [word for word in arguments.globs if "://" in word or os.path.exists(word)]
    arguments.globs = [word for word in arguments.globs if word not in others]
    paths = [arguments.path, *others]

    def list_one(path: str) -> int:
        if others and not arguments.json:
            write_lines([*([""] if path != paths[0] else []), f"{printable(path)}:"])
        return _list(path, arguments)

    return run_each(paths, list_one)


def _list(path: str, arguments: argparse.Namespace) -> int:
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointNotFoundError:
        # Only the folder of a run needs it.
        from holdfast.cli.run_folder import find_run, write_run  # noqa: PLC0415

        steps = find_run(path)
        if not any(step["complete"] for step in steps):
            raise
        if arguments.globs:
            words, last = " ".join(arguments.globs), f"{path.rstrip('/')}/{steps[-1]['folder']}"
            text = f"{path} is the folder of a run: {words} selects keys of a checkpoint, such as {last}"
            return complain(text, WRONG_USAGE)
        write_run(path, steps, as_json=arguments.json)
        return FINE
    parts = [(part, _pick(part, arguments)) for part in checkpoint.parts()]
    # The values of small objects that will be seen.
    values = [{} if arguments.depth is not None else read_small(checkpoint, entries) for _, entries in parts]
    if arguments.json:
        write_json(_document(path, parts, values))
    else:
        for number, (part, entries) in enumerate(parts):
            lines = _lines(part, entries, values[number], arguments)
            write_lines(["", *lines] if number else lines)
    if arguments.globs and not any(entries for _, entries in parts):
        total = sum(len(part.entries) for part, _ in parts)
        words = " ".join(arguments.globs)
        return complain(f"{path}: no key matches {words}; there are {counted(total, 'key')}", WRONG_USAGE)
    return FINE


def _pick(part: Inventory, arguments: argparse.Namespace) -> list[Entry]:
    entries = part.entries
    if arguments.globs:
        wanted = re.compile("|".join(fnmatch.translate(glob) for glob in arguments.globs)).match
        entries = [entry for entry in entries if wanted(entry.key)]
    if arguments.sort == "name":
        entries = sorted(entries, key=lambda entry: entry.key)
    elif arguments.sort == "size":
        entries = sorted(entries, key=lambda entry: (-entry_nbytes(entry), entry.key))
    return entries


def _lines(
    part: Inventory, entries: list[Entry], values: dict[str, Any], arguments: argparse.Namespace
) -> list[str]:
    style = Style(sys.stdout)
    folded = [] if arguments.flat or arguments.globs else [e for e in entries if kept_key(e.key)]
    # One line stands for what may be a hundred statistics of each of a hundred ranks.
    shown = [entry for entry in entries if not kept_key(entry.key)] if folded else entries
    rows: list[tuple[str, ...]]
    if arguments.flat:
        rows = [(printable(entry.key), *_facts(entry, values)) for entry in entries]
    else:
        rows = list(_tree_rows(part, shown, values, arguments, style))
    lines = aligned(rows, right=(3,))
    title = [] if part.rank is None else [style.bold(f"rank {part.rank}")]
    return [*title, *lines, *map(style.dim, _kept_line(folded)), style.dim(_totals(part, entries))]


def _kept_line(kept: list[Entry]) -> list[str]:
    """One line about values that were kept for single ranks; none if there are none."""
    if not kept:
        return []
    told = [found for entry in kept if (found := kept_key(entry.key))]
    keys = counted(len({found.key for found in told}), "key")
    ranks = counted(len({found.rank for found in told}), "rank")
    size = size_text(sum(map(entry_nbytes, kept)))
    return [f"{keys} with other values on {ranks}, {size}: see '{KEPT}*'"]


def _tree_rows(
    part: Inventory,
    entries: list[Entry],
    values: dict[str, Any],
    arguments: argparse.Namespace,
    style: Style,
) -> Iterator[tuple[str, ...]]:
    root = make_tree(entries, part.paths, arguments.sort)
    for branch, node, cut in branches(root, depth=arguments.depth, with_lines=style.has_lines):
        if node.entry is not None:
            yield (branch, *_facts(node.entry, values))
        elif cut:
            yield (branch, "...", counted(node.count, "key"), size_text(node.nbytes), "")
        else:
            yield (branch, "", "", size_text(node.nbytes), "")


def _facts(entry: Entry, values: dict[str, Any]) -> tuple[str, str, str, str]:
    """Dtype, shape, size, and the value of a small object, or what is unusual."""
    if isinstance(entry, ObjectEntry):
        last = value_text(values[entry.key]) if entry.key in values else ""
        return "object", "", size_text(entry_nbytes(entry)), last if entry.item else "not stored"
    if entry.chunk_count == 1 and entry.is_stored:
        return _whole_facts(entry.dtype, entry.shape, entry.nbytes)
    unusual = "" if entry.chunk_count == 1 else counted(entry.chunk_count, "chunk")
    if not entry.is_stored:
        unusual += ", not all stored" if unusual else "not stored"
    return entry.dtype, shape_text(entry.shape), size_text(entry.nbytes), unusual


@lru_cache(maxsize=4096)  # models repeat their shapes layer by layer
def _whole_facts(dtype: str, shape: tuple[int, ...], nbytes: int | None) -> tuple[str, str, str, str]:
    return dtype, shape_text(shape), size_text(nbytes), ""


def _totals(part: Inventory, entries: list[Entry]) -> str:
    tensors = [entry for entry in entries if isinstance(entry, TensorEntry)]
    objects = [entry for entry in entries if isinstance(entry, ObjectEntry)]
    text = f"{counted(len(tensors), 'tensor')}, {size_text(sum(map(entry_nbytes, tensors)))}"
    text += f"; {counted(len(objects), 'object')}, {size_text(sum(map(entry_nbytes, objects)))}"
    if len(entries) < len(part.entries):
        return f"{text}; of {counted(len(part.entries), 'key')}"
    return text


def _document(
    path: str, parts: list[tuple[Inventory, list[Entry]]], values: list[dict[str, Any]]
) -> dict[str, Any]:
    tensors = [
        _tensor(part, entry) for part, of_part in parts for entry in of_part if isinstance(entry, TensorEntry)
    ]
    objects = [
        {
            "rank": part.rank,
            "key": entry.key,
            **_place(entry.item),
            **({"value": as_json(known[entry.key])} if entry.key in known else {}),
        }
        for (part, of_part), known in zip(parts, values, strict=True)
        for entry in of_part
        if isinstance(entry, ObjectEntry)
    ]
    totals = {
        "tensors": len(tensors),
        "tensor_nbytes": sum(tensor["nbytes"] or 0 for tensor in tensors),
        "objects": len(objects),
        "object_nbytes": sum(value["stored_nbytes"] or 0 for value in objects),
    }
    return {"schema": "holdfast.ls/1", "path": path, "tensors": tensors, "objects": objects, "totals": totals}


def _tensor(part: Inventory, entry: TensorEntry) -> dict[str, Any]:
    return {
        "rank": part.rank,
        "key": entry.key,
        "dtype": entry.dtype,
        "shape": entry.shape,
        "nbytes": entry.nbytes,
        "chunks": [
            {"offsets": chunk.offsets, "lengths": chunk.lengths, **_place(chunk.item)}
            for chunk in entry.chunks
        ],
    }


def _place(item: StorageInfo | None) -> dict[str, Any]:
    """Where an item lies; all None if nowhere."""
    if item is None:
        return {"file": None, "offset": None, "stored_nbytes": None, "transforms": []}
    return {
        "file": item.relative_path,
        "offset": item.offset,
        "stored_nbytes": item.length,
        "transforms": item.transform_descriptors or [],
    }
