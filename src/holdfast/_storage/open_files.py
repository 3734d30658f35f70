"""The files of a load, each open only while jobs on it are left: a checkpoint may have 100,000 of them."""

import contextlib
import threading
from collections.abc import Callable, Sequence

from holdfast._format.item_table import Payload
from holdfast._io.file_access import FileReader
from holdfast._io.progress import STRIDE, ProgressTracker
from holdfast._io.store import FileSource
from holdfast.errors import AccessDeniedError, ChecksumError


def sizes_of_files(store: FileSource) -> dict[str, int]:
    """The size of every file, if the store tells them all at once. If not, each file must be asked for."""
    if store.traits.lists_sizes:
        with contextlib.suppress(AccessDeniedError):
            return store.list()
    return {}


class SharedFile:
    """One file, opened by the first of its jobs and closed by the last.

    Jobs are carried out in the order of files, so that hardly more files are open at once than threads
    work.

    Args:
        store: The checkpoint.
        name: The file's name.
        progress: Told of every byte that is read.
    """

    def __init__(self, store: FileSource, name: str, progress: ProgressTracker) -> None:
        self.store = store
        self.name = name
        self._progress = progress
        self._lock = threading.RLock()
        self._reader: FileReader | None = None
        self._jobs_left = 0

    @property
    def path(self) -> str:
        """How the user would name it."""
        return f"{self.store.url}/{self.name}"

    def read_into(self, offset: int, view: memoryview) -> None:
        """As ``FileReader.read_into``; only for the jobs of this file."""
        self._open().read_into(offset, view)
        self._report(len(view))

    def read_blocks_into(self, view: memoryview, payload: Payload, start: int) -> None:
        """As ``FileReader.read_blocks_into``; only for the jobs of this file."""
        self._open().read_blocks_into(view, payload, start)
        self._report(len(view))

    def read_together(self, offset: int, view: memoryview, payloads: Sequence[Payload]) -> None:
        """As ``FileReader.read_together``; only for the jobs of this file."""
        self._open().read_together(offset, view, payloads)
        self._report(len(view))

    def read_neighbours(
        self, offset: int, view: memoryview, payloads: Callable[[], Sequence[Payload]]
    ) -> None:
        """Fill ``view`` with small items from ``offset`` on; only for the jobs of this file.

        A store that sends bytes over a network is asked again if they do not agree with what ``payloads``
        returns. What is damaged all the same raises nothing here: the caller checks each item, and can name
        its key.
        """
        if self.store.traits.request_nbytes and (known := payloads()):
            with contextlib.suppress(ChecksumError):
                self._open().read_together(offset, view, known)
        else:
            self._open().read_into(offset, view)
        self._report(len(view))

    def _report(self, nbytes: int) -> None:
        for at in range(0, nbytes, STRIDE):
            self._progress.advance(min(STRIDE, nbytes - at))

    def _open(self) -> FileReader:
        with self._lock:
            if self._reader is None:
                self._reader = self.store.open(self.name)
                self._reader.progress = self._progress
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
                self.close()

    def close(self) -> None:
        """Close it, whatever is left to do."""
        with self._lock:
            if self._reader is not None:
                self._reader.close()
                self._reader = None
