"""Owns the page that trainer and helper both see: how far each request is, and whether it shall stop.

Whoever wants to know looks at memory. No message is sent for it, no thread of the trainer is woken, and a
request can be cancelled while the helper does not read its messages.
"""

import mmap
import os
import tempfile

__all__ = ["Slate", "Slot", "make_nameless_file"]

_SLOTS = 2048
"""Requests share a slot when they are so many apart; nobody has so many under way."""

_DONE, _CANCELLED = range(2)
_FIELDS = 2
_NBYTES = _SLOTS * _FIELDS * 8


class Slate:
    """The page.

    Args:
        fd: A file of this process that both have; the slate keeps its own descriptor of it.
    """

    def __init__(self, fd: int) -> None:
        os.ftruncate(fd, _NBYTES)
        # One number is one aligned store of 8 bytes: nobody sees half of one.
        self._numbers = memoryview(mmap.mmap(fd, _NBYTES)).cast("q")

    def slot(self, number: int) -> "Slot":
        """The place of a request."""
        at = number % _SLOTS * _FIELDS
        return Slot(self._numbers[at : at + _FIELDS])


class Slot:
    """What is noted of one request.

    Attributes:
        done: Bytes that have been written.
        cancelled: Whether it shall stop.
    """

    def __init__(self, numbers: memoryview) -> None:
        self._numbers = numbers

    def clear(self) -> None:
        """Begin anew."""
        for field in range(_FIELDS):
            self._numbers[field] = 0

    @property
    def done(self) -> int:
        """Bytes that have been written."""
        return int(self._numbers[_DONE])

    @property
    def cancelled(self) -> bool:
        """Whether to stop."""
        return bool(self._numbers[_CANCELLED])

    def note(self, done: int) -> None:
        """Say how far it is."""
        self._numbers[_DONE] = done

    def cancel(self) -> None:
        """Have it stop."""
        self._numbers[_CANCELLED] = 1


def make_nameless_file(purpose: str) -> int:
    """The descriptor of an empty file that no folder knows; it is gone with its last user."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"holdfast-{purpose}", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix=f"holdfast-{purpose}-") as file:
        return os.dup(file.fileno())
