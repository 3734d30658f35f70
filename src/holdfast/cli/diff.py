"""``holdfast diff``: what two checkpoints have in common, and by how much their values differ."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from holdfast._any_format import open_checkpoint
from holdfast._contents.inventory import Inventory, ObjectEntry, StoredChunk, TensorEntry
from holdfast._contents.opening import Checkpoint
from holdfast.cli.exit_codes import FINE
from holdfast.cli.summary import states_of_files
from holdfast.cli.text import Style, counted, printable, shape_text, write_json, write_lines
from holdfast.errors import UsageError

__all__ = ["run"]

DIFFERENT = 1
"""The exit code for checkpoints that differ."""

Entry = TensorEntry | ObjectEntry


@dataclass
class _Difference:
    """The differences between two checkpoints.

    Attributes:
        only_first: Keys that the second one does not have.
        only_second: Keys that the first one does not have.
        kinds: Keys with another shape, dtype or kind, with both in words.
        values: Keys with other values, with the size of the difference.
        equal: How many keys are equal.
        by_checksum: How many of these were found equal by their checksums, without being read.
        damaged: Data files that are missing or have another size, and of which checkpoint.
    """

    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    kinds: list[dict[str, str]] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)
    equal: int = 0
    by_checksum: int = 0
    damaged: list[dict[str, str]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether the checkpoints are equal."""
        return not (self.only_first or self.only_second or self.kinds or self.values or self.damaged)


def run(arguments: argparse.Namespace) -> int:
    """Compare, print what differs, and return the exit code."""
    found = _compare(arguments.path, arguments.other)
    if arguments.json:
        paths = {"schema": "holdfast.diff/1", "path": arguments.path, "other": arguments.other}
        write_json({**paths, "equal_checkpoints": found.is_empty, **asdict(found)})
    elif not arguments.quiet:
        write_lines(_lines(arguments, found))
    return FINE if found.is_empty else DIFFERENT


def _compare(first: str, second: str) -> _Difference:
    places = open_checkpoint(first), open_checkpoint(second)
    parts = [_read(place) for place in places]
    ours, theirs = ({entry.key: entry for entry in part.entries} for part in parts)
    found = _Difference(
        only_first=[key for key in ours if key not in theirs],
        only_second=[key for key in theirs if key not in ours],
        # What is equal by its checksums is not read, so a copy that was cut off would seem to be equal.
        damaged=[
            {"path": path, "file": file["name"], "state": file["state"]}
            for path, place, part in zip((first, second), places, parts, strict=True)
            for file in states_of_files(part, place.sizes(part))
            if file["state"] != "present"
        ],
    )
    unknown: list[Entry] = []
    for key, entry in ours.items():
        other = theirs.get(key)
        if other is None:
            continue
        if _kind(entry) != _kind(other):
            found.kinds.append({"key": key, "first": _kind(entry), "second": _kind(other)})
        elif _has_equal_checksums(entry, other):
            found.by_checksum += 1
        else:
            unknown.append(entry)
    if unknown:
        found.values = _different_values(first, second, unknown)
    found.equal = found.by_checksum + len(unknown) - len(found.values)
    return found


def _different_values(first: str, second: str, entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """By how much values differ, of those entries whose values do."""
    # These bring torch, which takes seconds: only what checksums do not tell needs it.
    from holdfast.cli.value_difference import difference_of  # noqa: PLC0415
    from holdfast.reader import open as open_view  # noqa: PLC0415

    with open_view(first) as ours, open_view(second) as theirs:
        differences = ((entry.key, difference_of(ours[entry.key], theirs[entry.key])) for entry in entries)
        return [{"key": key, **difference} for key, difference in differences if difference is not None]


def _read(checkpoint: Checkpoint) -> Inventory:
    rank, name = checkpoint.metadata_names[0]
    if rank is not None:
        raise UsageError(
            f"{checkpoint.store.url}: parts that ranks saved each for itself are not compared",
            path=checkpoint.store.url,
        )
    return checkpoint.read(rank, name)


def _kind(entry: Entry) -> str:
    return f"{entry.dtype} {shape_text(entry.shape)}" if isinstance(entry, TensorEntry) else "an object"


def _has_equal_checksums(first: Entry, second: Entry) -> bool:
    """Whether both are stored in the same chunks with the same checksums; False if that is not known."""
    sums = _checksums(first)
    return sums is not None and sums == _checksums(second)


def _checksums(entry: Entry) -> Any:
    """The checksums of all chunks, by their place in the tensor; None if they do not tell the values."""
    chunks = [StoredChunk((), (), entry.item)] if isinstance(entry, ObjectEntry) else entry.chunks
    found = {}
    for offsets, lengths, item in chunks:
        # What torch wrote has no checksums; those of transformed items are of what the transform made.
        if item is None or not item.is_raw or not item.is_checked:
            return None
        found[offsets] = (lengths, item.block_size, item.payload_nbytes, bytes(item.checksums))
    return found


def _lines(arguments: argparse.Namespace, found: _Difference) -> Iterator[str]:
    style = Style(sys.stdout)
    alone = len(found.only_first) + len(found.only_second)
    for keys, path in ((found.only_first, arguments.path), (found.only_second, arguments.other)):
        for key in keys:
            yield f"{style.bad('only in')} {printable(path)}: {printable(key)}"
    for change in found.kinds:
        yield f"{style.bad('kind')}    {printable(change['key'])}: {change['first']} -> {change['second']}"
    for value in found.values:
        yield f"{style.bad('values')}  {printable(value['key'])}: {_in_words(value)}"
    for file in found.damaged:
        yield f"{style.bad('damaged')} {printable(file['path'])}: {printable(file['file'])}: {file['state']}"
    verdict = style.good("equal") if found.is_empty else style.bad("different")
    parts = [
        f"{counted(found.equal, 'key')} equal ({found.by_checksum:,} by checksum)",
        f"{counted(len(found.values), 'key')} with other values",
        *([f"{counted(len(found.kinds), 'key')} of another kind"] if found.kinds else []),
        *([f"{counted(alone, 'key')} in one of them only"] if alone else []),
    ]
    yield f"{verdict}: {', '.join(parts)}"


def _in_words(value: dict[str, Any]) -> str:
    if "elements" not in value:
        return f"{printable(value['first'])} -> {printable(value['second'])}"
    text = f"{value['differing']:,} of {value['elements']:,} elements differ"
    if value["largest"] is None:
        return text
    return f"{text}, by {value['largest']:.3g} at most, {value['mean']:.3g} on average"
