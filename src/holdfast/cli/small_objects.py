"""The values of small objects that are plain data: read without torch, and nothing of them is run."""

import json
from collections.abc import Iterable
from typing import Any

from holdfast._contents.inventory import ObjectEntry, TensorEntry
from holdfast._contents.object_bytes import NotPlainError, plain_value
from holdfast._contents.opening import Checkpoint
from holdfast._contents.value_reader import ObjectPart, ValueReader
from holdfast.cli.text import printable
from holdfast.errors import CheckpointError

__all__ = ["as_json", "read_small", "value_text"]

_SMALL = 4096
_MOST = 1000
_LONGEST_TEXT = 60


def read_small(checkpoint: Checkpoint, entries: Iterable[TensorEntry | ObjectEntry]) -> dict[str, Any]:
    """The values of small objects by key. What is not plain data, or cannot be read, is left out.

    Of more than 1,000 objects none is read: that would take longer than the rest of the command.
    """
    parts = [
        ObjectPart(entry.key, entry.item)
        for entry in entries
        if isinstance(entry, ObjectEntry) and entry.item is not None and entry.item.length <= _SMALL
    ]
    if not 0 < len(parts) <= _MOST:
        return {}
    reader = ValueReader(checkpoint.store)
    try:
        _read(reader, parts)
    finally:
        reader.close()
    values = {}
    for part in parts:
        if part.stored is not None:
            try:
                values[part.key] = plain_value(part.stored, path=checkpoint.url)
            except NotPlainError:
                continue
    return values


def _read(reader: ValueReader, parts: list[ObjectPart]) -> None:
    try:
        reader.read(parts)
    except (CheckpointError, OSError):
        # One of them is damaged: `holdfast verify` says which. The others are shown.
        for part in parts:
            try:
                reader.read([part])
            except (CheckpointError, OSError):  # noqa: PERF203 - each on its own
                part.stored = None


def value_text(value: Any) -> str:
    """A value in one short line."""
    text = repr(value[:_LONGEST_TEXT] if isinstance(value, str | bytes | bytearray) else value)
    is_cut = len(text) > _LONGEST_TEXT
    return printable(f"{text[: _LONGEST_TEXT - 3]}..." if is_cut else text)


def as_json(value: Any) -> Any:
    """A value as JSON has it; its text if JSON cannot have it."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return value_text(value)
    return value
