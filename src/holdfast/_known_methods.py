"""Marks the methods of our plugins whose effect the engine knows, so that it may take a shorter way."""

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def known_to_engine(method: F) -> F:
    """Mark a method of a planner or reader that does no more than its name says.

    Such a ``read_metadata`` returns the same on every rank, so that one rank may read for all. Such a
    ``create_global_plan`` or ``prepare_global_plan`` of a load returns the plans as they are, so that ranks
    need not send them. Such a ``read_data`` may be replaced by ``read_data_together``. A subclass or an
    instance that replaces the method loses the mark.
    """
    method.is_known_to_engine = True  # type: ignore[attr-defined]
    return method
