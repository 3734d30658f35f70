"""The guard around what changes the state: waits until a copy that is being made of it is complete."""

from concurrent.futures import Future, wait
from types import TracebackType


class UpdateGuard:
    """A context manager that may be entered any number of times, one after the other.

    Attributes:
        staging: The copy that may not be complete yet; None if all are.
    """

    __slots__ = ("staging",)

    def __init__(self) -> None:
        self.staging: Future[None] | None = None

    def wait(self) -> None:
        """Wait until no copy is being made."""
        if self.staging is not None:
            wait([self.staging])  # a copy that failed is reported by its save
            self.staging = None

    def __enter__(self) -> None:
        self.wait()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        pass
