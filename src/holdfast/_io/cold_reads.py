"""Owns how bytes that are not in memory yet are read from a local disk: through the page cache or past it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast._io.page_cache import PageCache, room_for

_TRIAL_NBYTES = 64 << 20
"""How much of a device is read through the page cache before it is decided whether the rest is, too."""

_BUSY = 0.4
"""A disk is faster than copying if more than this share of the time of such reads goes into copying. It is
nearly all, or half of it where four threads share two cores. Of a disk of 2 GB/s it was 0.1 to 0.3."""


@dataclass
class _Device:
    """What this process has measured of a device."""

    nbytes: int = 0
    worked: float = 0.0
    passed: float = 0.0

    @property
    def is_faster_than_copying(self) -> bool:
        return self.nbytes >= _TRIAL_NBYTES and self.worked > _BUSY * self.passed


_devices: dict[int, _Device] = {}


class ColdReads:
    """Decides, for one store, which way cold reads go.

    ``"keep"`` reads through the page cache, and ``"bypass"`` past it. ``"auto"`` does what costs nobody
    anything: past the cache if memory has no room for what will be read, or if nobody has said how much
    that is; past it as well if the disk turns out to be faster than copying; and through it otherwise, so
    that the next load of the same bytes, by this process or another one, finds them in memory.

    Args:
        choice: One of these three.
    """

    def __init__(self, choice: PageCache) -> None:
        self.choice = choice
        self._expected = 0
        self._has_room: bool | None = None

    def expect(self, nbytes: int) -> None:
        """Take note that so many bytes will be read, in all; the largest number that was told counts."""
        if nbytes > self._expected:
            self._expected, self._has_room = nbytes, None

    def go_through_cache(self, device: int) -> bool:
        """Whether the next cold bytes of a device are read through the page cache."""
        if self.choice != "auto":
            return self.choice == "keep"
        if self._has_room is None:
            self._has_room = self._expected > 0 and room_for(self._expected)
        return self._has_room and not _devices.setdefault(device, _Device()).is_faster_than_copying

    @contextmanager
    def observed(self, device: int, nbytes: int) -> Iterator[None]:
        """Measure a cold read through the cache, by the thread that reads, while there is nothing known."""
        found = _devices.setdefault(device, _Device())
        if self.choice != "auto" or found.nbytes >= _TRIAL_NBYTES:
            yield
            return
        worked, passed = time.thread_time(), time.perf_counter()
        yield
        found.worked += time.thread_time() - worked
        found.passed += time.perf_counter() - passed
        found.nbytes += nbytes
