"""Owns which colour stands for what; ``style.css`` says what the colours are."""

__all__ = ["phase_colour", "rank_colour"]

_RANKS = 7
"""How many colours tell ranks apart; ranks beyond that begin again."""

_PHASES = {"stage": 0, "plan": 4, "write": 2, "read": 2, "commit": 1, "read metadata": 5}


def rank_colour(rank: int | None) -> str:
    """The class of what belongs to a rank; None if nobody knows which."""
    return "c7" if rank is None else f"c{rank % _RANKS}"


def phase_colour(name: str) -> str:
    """The class of a phase of a save or load."""
    return f"c{_PHASES.get(name, 6)}"
