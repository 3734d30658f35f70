"""Shows how far a save, a load or another long transfer is: a bar in a terminal, log lines elsewhere."""

import contextlib
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO, TypeAlias

from typing_extensions import Self

from holdfast._human_units import rate_text, seconds_text, size_text
from holdfast._io.progress import Progress, ProgressTracker
from holdfast.errors import UsageError

__all__ = ["ProgressObserver", "ProgressOption", "in_words", "observer", "tracking"]

logger = logging.getLogger(__name__)

ProgressOption: TypeAlias = "bool | Callable[[Progress], object] | None"
"""What callers may say: True to show it, a function that is told of it, or neither."""

_REDRAW = 0.1
"""Seconds between two pictures of a bar."""

_LOG = 10.0
"""Seconds between two log lines. What is done sooner logs none."""

_WIDTH = 30


class ProgressObserver:
    """Is called with each ``Progress`` of one transfer, one call at a time, and closed at its end.

    It is a context manager that closes itself. ``close`` may be called twice.

    Args:
        show: Takes how far the transfer is. An exception from it stops the transfer.
        seconds: How much time must pass before ``show`` is called, and between two calls of it.
        end: Called when the transfer has ended, however it did.
    """

    def __init__(
        self,
        show: Callable[[Progress], object],
        seconds: float = 0.0,
        end: Callable[[], object] = lambda: None,
    ) -> None:
        self._show, self._seconds, self._end = show, seconds, end
        self._shown = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        """Show how far the transfer is, unless that was shown a moment ago."""
        now = time.monotonic()
        if now - self._shown >= self._seconds:
            self._shown = now
            self._show(progress)

    def close(self) -> None:
        """The transfer has ended: take the bar away."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def observer(
    progress: ProgressOption, what: str, *, rank: int = 0, stream: TextIO | None = None
) -> ProgressObserver | None:
    """Make the observer of one transfer's progress.

    Args:
        progress: None or False for nobody. True shows it, on rank 0 only: in a terminal as a bar, elsewhere
            as a line at level INFO every ten seconds. A function is called with each ``Progress``, on every
            rank.
        what: What is being done, in a few words, such as "saving checkpoints/100".
        rank: The rank of this process.
        stream: Where a bar is drawn; stderr by default.

    Returns:
        The observer, to be closed at the end; None if nobody wants to know.

    Raises:
        UsageError: ``progress`` is something else.

    Example:
        >>> with observer(True, "copying") or contextlib.nullcontext() as watching:
        ...     tracker = ProgressTracker.reporting_to(watching)
    """
    if progress is None or progress is False:
        return None
    if progress is not True:
        if not callable(progress):
            raise UsageError(f"progress is True, False or a function, not {progress!r}", found=progress)
        return ProgressObserver(progress)
    if rank != 0:
        return None
    stream = sys.stderr if stream is None else stream
    if stream is None or not stream.isatty():
        return ProgressObserver(lambda done: logger.info("%s: %s", what, in_words(done)), _LOG)
    return ProgressObserver(lambda done: _draw(stream, _bar(what, done)), _REDRAW, lambda: _draw(stream, ""))


@contextlib.contextmanager
def tracking(progress: ProgressOption, what: str, *, rank: int = 0) -> Iterator[ProgressTracker | None]:
    """A tracker for one transfer that tells the observer of ``progress``, which is closed at the end.

    It is None if nobody wants to know. The arguments are those of :func:`observer`.
    """
    with observer(progress, what, rank=rank) or contextlib.nullcontext() as watching:
        yield ProgressTracker.reporting_to(watching)


def _bar(what: str, progress: Progress) -> str:
    """One line of a terminal."""
    bar = "#" * round(_share(progress) * _WIDTH)
    line = f"{what} [{bar:<{_WIDTH}}] {in_words(progress)}"
    # The end of it: a line that is wrapped could not be drawn over.
    return line[-(shutil.get_terminal_size().columns - 1) :]


def _draw(stream: TextIO, line: str) -> None:
    """Draw over the line that was drawn before."""
    stream.write(f"\r\033[K{line}")
    stream.flush()


def _share(progress: Progress) -> float:
    return min(1.0, progress.nbytes_done / progress.nbytes_total) if progress.nbytes_total else 0.0


def in_words(progress: Progress) -> str:
    """How far a transfer is, how fast, and how long it will take, for people."""
    done, total, rate = progress
    if not total:
        return size_text(done)
    words = f"{_share(progress):4.0%} {size_text(done)} of {size_text(total)}, {rate_text(rate)}"
    return f"{words}, {seconds_text((total - done) / rate)} left" if rate > 0 and done < total else words
