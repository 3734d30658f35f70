"""Memory that the trainer and the writer process share: how far each request is, and whether it is cancelled.

Reading it sends no message and wakes no thread, and a request can be cancelled while the writer process does
not read its messages.
"""

import mmap
import os

_SLOTS = 2048
"""Requests whose numbers are this far apart share a slot. There are never so many at a time."""

_NBYTES_DONE, _CANCELLED = range(2)
_FIELDS = 2
_NBYTES = _SLOTS * _FIELDS * 8


class SharedProgress:
    """The slots of all requests.

    Args:
        fd: A file that both processes have open. It may be closed afterwards.
    """

    def __init__(self, fd: int) -> None:
        os.ftruncate(fd, _NBYTES)
        # A number is one aligned store of 8 bytes: nobody can read half of one.
        self._numbers = memoryview(mmap.mmap(fd, _NBYTES)).cast("q")

    def slot(self, number: int) -> "ProgressSlot":
        """The slot of the request with this number."""
        at = number % _SLOTS * _FIELDS
        return ProgressSlot(self._numbers[at : at + _FIELDS])


class ProgressSlot:
    """The shared facts of one request. Either process may use it at any time."""

    def __init__(self, numbers: memoryview) -> None:
        self._numbers = numbers

    def clear(self) -> None:
        """Set the slot to 0 bytes and not cancelled."""
        self._numbers[_NBYTES_DONE] = self._numbers[_CANCELLED] = 0

    @property
    def nbytes_done(self) -> int:
        """The bytes that were written so far."""
        return int(self._numbers[_NBYTES_DONE])

    @nbytes_done.setter
    def nbytes_done(self, nbytes: int) -> None:
        self._numbers[_NBYTES_DONE] = nbytes

    @property
    def is_cancelled(self) -> bool:
        """Whether the trainer has cancelled the request."""
        return bool(self._numbers[_CANCELLED])

    def cancel(self) -> None:
        """Cancel the request."""
        self._numbers[_CANCELLED] = 1
