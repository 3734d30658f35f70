"""What a load did: which keys it filled, which it left alone, and what else the checkpoint has."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast._transfer_record import TransferRecord

__all__ = ["LoadResult"]

_MOST_GROUPS = 8
_MOST_NAMES = 3


@dataclass(frozen=True, repr=False)
class LoadResult:
    """What ``load`` did on this rank, as flat keys.

    ``print(result)`` shows a summary of a few lines, however many keys there are.

    Attributes:
        loaded: The keys of the state that were filled or replaced. A sharded tensor of which this rank holds
            no element is one of them if the checkpoint has it.
        left_alone: The keys of the state that were not: the checkpoint does not have them
            (``allow_partial_load``), or has them in another shape (``ignore_mismatched_sizes``). Empty if the
            planner does not say what the state holds.
        not_asked_for: The keys of the checkpoint that were not read because the state does not have them.
            Values that other ranks keep in the same ``PerRank`` are not among them.
        user_metadata: What the caller of the save wanted to keep with the checkpoint.
        record: What the load did, by phase and rank: seconds, bytes, waits, the slowest rank.
    """

    loaded: tuple[str, ...] = ()
    left_alone: tuple[str, ...] = ()
    not_asked_for: tuple[str, ...] = ()
    user_metadata: Mapping[str, Any] = field(default_factory=dict, compare=False)
    record: TransferRecord | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return (
            f"LoadResult(loaded={len(self.loaded)} keys, left_alone={len(self.left_alone)} keys, "
            f"not_asked_for={len(self.not_asked_for)} keys)"
        )

    def __str__(self) -> str:
        parts = {
            "loaded": self.loaded,
            "left alone": self.left_alone,
            "not asked for": self.not_asked_for,
        }
        lines = []
        for title, keys in parts.items():
            lines.append(f"{title}: {_count(len(keys))}")
            lines.extend(f"  {line}" for line in _group_lines(keys))
        return "\n".join(lines)


def _count(number: int) -> str:
    return f"{number:,} key" if number == 1 else f"{number:,} keys"


def _group_lines(keys: Iterable[str]) -> list[str]:
    """One line for each first name: how many keys it has, and a few of them."""
    groups: dict[str, list[str]] = {}
    for key in keys:
        groups.setdefault(key.partition(".")[0], []).append(key)
    lines = [
        f"{name}: {_count(len(members))}: {', '.join(members[:_MOST_NAMES])}"
        f"{', ...' if len(members) > _MOST_NAMES else ''}"
        if members != [name]
        else name
        for name, members in list(groups.items())[:_MOST_GROUPS]
    ]
    if len(groups) > _MOST_GROUPS:
        lines.append(f"and {len(groups) - _MOST_GROUPS:,} more names")
    return lines
