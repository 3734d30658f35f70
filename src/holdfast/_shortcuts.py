"""What ranks need not tell each other, because the method that would use it is one that we know."""

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = [
    "alike_everywhere",
    "can_read_together",
    "is_alike_everywhere",
    "leaves_plans_alone",
    "passes_plans_on",
    "reads_together",
]

F = TypeVar("F", bound=Callable[..., Any])


def alike_everywhere(method: F) -> F:
    """Mark a method that returns the same on every rank: one rank may call it and tell the others."""
    method.alike_everywhere = True  # type: ignore[attr-defined]
    return method


def is_alike_everywhere(owner: object, method: str) -> bool:
    """Whether a method is marked so. One that a subclass or an instance has replaced is not."""
    return bool(getattr(getattr(owner, method), "alike_everywhere", False))


def passes_plans_on(method: F) -> F:
    """Mark a method that returns the ranks' plans as they are: they need not be brought together for it."""
    method.passes_plans_on = True  # type: ignore[attr-defined]
    return method


def leaves_plans_alone(owner: object, method: str) -> bool:
    """Whether a method is marked so. One that a subclass or an instance has replaced is not."""
    return bool(getattr(getattr(owner, method), "passes_plans_on", False))


def reads_together(method: F) -> F:
    """Mark the ``read_data`` of a reader that has a ``read_data_together`` besides."""
    method.reads_together = True  # type: ignore[attr-defined]
    return method


def can_read_together(reader: object) -> bool:
    """Whether a reader can. One whose ``read_data`` a subclass or an instance has replaced cannot."""
    return bool(getattr(reader.read_data, "reads_together", False))  # type: ignore[attr-defined]
