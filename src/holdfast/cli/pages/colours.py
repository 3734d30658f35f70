"""Owns which colour stands for what; ``style.css`` says what the colours are."""

from collections.abc import Iterable

__all__ = ["RankColours", "phase_colour"]

_FEW = 7
"""How many colours are told apart by themselves; the eighth is grey."""

_SCALE = 12
"""How many colours the scale has that shows many ranks in their order."""

_PHASES = {
    "prepare": 6,
    "stage": 0,
    "plan": 4,
    "write": 2,
    "read": 2,
    "commit": 1,
    "read metadata": 5,
    "restore": 3,
}


class RankColours:
    """A colour for each rank: one of its own if there are few, and otherwise a place on a scale.

    Args:
        ranks: The ranks that are drawn; None is one that nobody knows.
    """

    def __init__(self, ranks: Iterable[int | None]) -> None:
        self._known = sorted({rank for rank in ranks if rank is not None})
        self._places = {rank: place for place, rank in enumerate(self._known)}

    def of(self, rank: int | None) -> str:
        """The class of what belongs to a rank."""
        if rank is None:
            return "c7"
        place = self._places[rank]
        return f"s{place * _SCALE // len(self._known)}" if self.is_scale else f"c{place}"

    @property
    def ranks(self) -> list[int]:
        """The ranks that are known, in their order."""
        return self._known

    @property
    def is_scale(self) -> bool:
        """Whether neighbours may have one colour."""
        return len(self._known) > _FEW


def phase_colour(name: str) -> str:
    """The class of a phase of a save or load."""
    return f"c{_PHASES.get(name, 7)}"
