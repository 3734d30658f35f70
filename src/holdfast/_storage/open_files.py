"""The files of a load, each open only while jobs on it are left: a checkpoint may have 100,000 of them."""

import threading
from collections.abc import Callable
from typing import Any

from typing_extensions import Buffer

from holdfast._io.progress import STRIDE, ProgressTracker
from holdfast._io.store import FileReader, FileSource, byte_view

__all__ = ["SharedFile"]


class SharedFile:
    """One file, opened by the first of its jobs and closed by the last.

    Jobs are carried out in the order of files, so that hardly more files are open at once than threads
    work.

    Args:
        store: Where it is.
        name: Its name.
        progress: Is told of the bytes that are read from it.
    """

    def __init__(self, store: FileSource, name: str, progress: ProgressTracker) -> None:
        self.store = store
        self.name = name
        self._progress = progress
        self._lock = threading.Lock()
        self._reader: FileReader | None = None
        self._jobs_left = 0

    @property
    def path(self) -> str:
        """How the user would name it."""
        return f"{self.store.url}/{self.name}"

    def reader(self) -> FileReader:
        """The open file; only for the jobs of this file."""
        with self._lock:
            if self._reader is None:
                self._reader = _CountedReader(self.store.open(self.name), self._progress)
            return self._reader

    def job(self, work: Callable[[], None]) -> Callable[[], None]:
        """A job on this file."""
        self._jobs_left += 1

        def run() -> None:
            try:
                work()
            finally:
                self._leave()

        return run

    def _leave(self) -> None:
        with self._lock:
            self._jobs_left -= 1
            if self._jobs_left == 0:
                self._close()

    def close(self) -> None:
        """Close it, whatever is left to do."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class _CountedReader(FileReader):
    """Passes reads on, and tells how many bytes they gave."""

    def __init__(self, inner: FileReader, progress: ProgressTracker) -> None:
        self.path = inner.path
        self._inner = inner
        self._progress = progress

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self._inner.nbytes

    def read_into(self, offset: int, buffer: Buffer) -> None:
        view = byte_view(buffer)
        self._inner.read_into(offset, view)
        self._count(len(view))

    def read_blocks_into(self, buffer: Buffer, **payload: Any) -> None:
        view = byte_view(buffer)
        self._inner.read_blocks_into(view, **payload)
        self._count(len(view))

    def close(self) -> None:
        self._inner.close()

    def _count(self, nbytes: int) -> None:
        for at in range(0, nbytes, STRIDE):
            self._progress.advance(min(STRIDE, nbytes - at))
