"""The files of a load, each open only while jobs on it are left: a checkpoint may have 100,000 of them."""

import threading
from collections.abc import Callable

from holdfast._io.store import ByteStore, FileReader

__all__ = ["SharedFile"]


class SharedFile:
    """One file, opened by the first of its jobs and closed by the last.

    Jobs are carried out in the order of files, so that hardly more files are open at once than threads
    work.
    """

    def __init__(self, store: ByteStore, name: str) -> None:
        self.store = store
        self.name = name
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
                self._reader = self.store.open(self.name)
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
