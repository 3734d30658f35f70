"""Decides which thread frees what a background save holds: the caller's, until the save's own takes over."""

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

from typing_extensions import Self


class Handover:
    """A with-block in which a save is prepared and handed over to its thread.

    An interrupt may leave the block at any instant, also while the thread begins. Then either the block frees
    everything and the thread does nothing, or the thread goes on and frees everything when it ends.

    Attributes:
        held: Frees what the save holds.
    """

    def __init__(self) -> None:
        self.held = contextlib.ExitStack()
        self._cancel: Callable[[], Any] | None = None
        # The side that pops the entry frees everything. An interrupt could leave a lock taken for ever.
        self._right = [None]

    def offer(self, cancel: Callable[[], Any]) -> None:
        """Say that the thread may take over from now on; ``cancel`` stops it if it has, but need not."""
        self._cancel = cancel

    def take(self) -> bool:
        """Whether the caller of this gets what is held; the first one does."""
        try:
            self._right.pop()
        except IndexError:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cancel is not None and error is None:
            return
        if self._cancel is None or self.take():
            self.held.__exit__(kind, error, trace)
        else:
            self._cancel()
