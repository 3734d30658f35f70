"""What a write in the background heeds: it says how far it is, and stops when it is told to.

Whoever has something written says so around the call; ``write_items`` finds it there, because the call goes
through storage writers that are the user's own and have no parameter for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["STRIDE", "Oversight", "current_oversight", "overseen_by"]

STRIDE = 8 << 20
"""The most bytes that are written without a word in between."""


class Oversight:
    """Nobody's: nobody is told, and nothing stopped. Its methods are called by several threads at once."""

    def wrote(self, nbytes: int) -> None:
        """So many more bytes have been taken, ``STRIDE`` at most; raises if there shall be no more."""


_current: ContextVar[Oversight | None] = ContextVar("holdfast-oversight", default=None)


@contextmanager
def overseen_by(oversight: Oversight) -> Iterator[None]:
    """Have what is written inside a with-block, by this thread's calls, heed an oversight."""
    token = _current.set(oversight)
    try:
        yield
    finally:
        _current.reset(token)


def current_oversight() -> Oversight:
    """That of the innermost ``overseen_by`` around this call; nobody's if there is none."""
    return _current.get() or Oversight()
