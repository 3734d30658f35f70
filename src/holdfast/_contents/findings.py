"""What a verification finds, collected from many threads."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import IntegrityError, MetadataFormatError, UnsafeMetadataError


@dataclass
class Damage:
    """Something that is wrong.

    Attributes:
        kind: One of ``metadata``, ``missing file``, ``file too short``, ``file too long``, ``checksum``,
            ``container``, ``gap``, ``archive``, ``not stored``, ``not covered``,
            ``unreadable``.
        message: What, in a sentence without file and key.
        file: The file's name.
        keys: The keys that are affected, in the order of the checkpoint.
        offset: Where in the file it begins.
        nbytes: How far it reaches.
        rank: For a rank's own part, that rank.
    """

    kind: str
    message: str
    file: str | None = None
    keys: list[str] = field(default_factory=list)
    offset: int | None = None
    nbytes: int | None = None
    rank: int | None = None


class Findings:
    """Collects from any thread.

    Attributes:
        damages: What is wrong, in no order.
        notes: What is worth knowing, and not wrong.
        unchecked: How many items could not be checked, by the reason.
        checked_nbytes: How many bytes were read and compared.
        on_progress: Called with the bytes that were just checked, by one thread at a time.
    """

    def __init__(self) -> None:
        self.damages: list[Damage] = []
        self.notes: list[str] = []
        self.unchecked: dict[str, int] = {}
        self.checked_nbytes = 0
        self.on_progress: Callable[[int], None] | None = None
        self._lock = threading.Lock()

    def damage(self, kind: str, message: str, **details: Any) -> None:
        """Something is wrong."""
        with self._lock:
            self.damages.append(Damage(kind, message, **details))

    def note(self, message: str) -> None:
        """Something is worth knowing, and not wrong."""
        with self._lock:
            self.notes.append(message)

    def leave_unchecked(self, reason: str) -> None:
        """One item could not be checked."""
        with self._lock:
            self.unchecked[reason] = self.unchecked.get(reason, 0) + 1

    def advance(self, nbytes: int) -> None:
        """Bytes were read and compared."""
        with self._lock:
            self.checked_nbytes += nbytes
            if self.on_progress is not None:
                self.on_progress(nbytes)

    def sorted_damages(self) -> list[Damage]:
        """All of it by file and place; neighbouring blocks of one item as one."""
        merged: list[Damage] = []
        for damage in sorted(self.damages, key=_place):
            last = merged[-1] if merged else None
            if (
                last is not None
                and damage.kind == last.kind == "checksum"
                and (damage.file, damage.keys, damage.rank) == (last.file, last.keys, last.rank)
                and _end(last) == damage.offset
            ):
                last.nbytes = (last.nbytes or 0) + (damage.nbytes or 0)
            else:
                merged.append(damage)
        return merged


def _place(damage: Damage) -> tuple[Any, ...]:
    return (damage.rank or 0, damage.file or "", damage.offset or 0, damage.kind, damage.keys)


def _end(damage: Damage) -> int:
    return (damage.offset or 0) + (damage.nbytes or 0)


def says_damaged(error: Exception) -> bool:
    """Whether an error says that a checkpoint is damaged, and not that it cannot be read here at all."""
    if isinstance(error, UnsafeMetadataError) or not isinstance(error, IntegrityError):
        return False
    # A file of another format than this program knows is sound: only then another one was expected.
    return not (isinstance(error, MetadataFormatError) and error.expected is not None)
