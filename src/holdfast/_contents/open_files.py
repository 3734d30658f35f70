"""The files of a place that many jobs read: opened when they are read, and a bounded number kept open."""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from holdfast._format.item_table import Payload
from holdfast._io.file_access import FileReader
from holdfast._io.progress import STRIDE, ProgressTracker
from holdfast._io.store import FileSource
from holdfast.errors import ChecksumError, UsageError


class _OpenFile:
    """A file, once somebody has opened it, and by how many it is used."""

    def __init__(self) -> None:
        self.opening = threading.Lock()
        self.reader: FileReader | None = None
        self.users = 0


class OpenFiles:
    """Opens files, and keeps open those that were used last. Its methods may be called from any thread.

    A checkpoint may have 100,000 files. Jobs that are carried out in the order of files need hardly more of
    them at once than threads work.

    Args:
        store: The place.
        most: How many files may stay open that nobody uses.
        progress: Told of every byte that ``StoredFile`` reads, and of retries.
    """

    def __init__(self, store: FileSource, *, most: int, progress: ProgressTracker | None = None) -> None:
        self.store = store
        self.progress = progress
        self._most = most
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()
        self._is_closed = False

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[FileReader]:
        """A file, open for as long as the with-block lasts.

        Raises:
            UsageError: ``close`` has been called.
        """
        with self._lock:
            if self._is_closed:
                raise UsageError(f"{self.store.url}: this view is closed", path=self.store.url)
            file = self._files.setdefault(name, _OpenFile())
            self._files.move_to_end(name)
            file.users += 1
        try:
            # Not under the lock of all files: to open an object of a bucket is a request.
            with file.opening:
                if file.reader is None:
                    file.reader = self.store.open(name)
                    file.reader.progress = self.progress
            yield file.reader
        finally:
            with self._lock:
                file.users -= 1
            self._close_surplus()

    def close(self) -> None:
        """Close every file that nobody uses now, and the others when they are given back."""
        self._is_closed = True
        self._close_surplus()

    def __del__(self) -> None:
        # Descriptors of files are plain numbers, which nobody else closes if a view is only let go of.
        self.close()

    def _close_surplus(self) -> None:
        """Close the files used longest ago that nobody uses, as many as there are too many."""
        with self._lock:
            surplus = len(self._files) - (0 if self._is_closed else self._most)
            if surplus <= 0:
                return
            idle = [name for name, file in self._files.items() if not file.users]
            dropped = [self._files.pop(name) for name in idle[:surplus]]
        for file in dropped:
            if file.reader is not None:
                file.reader.close()


class StoredFile:
    """One of these files. It has the methods of a ``FileReader``, and is opened when it is read."""

    def __init__(self, files: OpenFiles, name: str) -> None:
        self.store = files.store
        self._files = files
        self._name = name

    @property
    def path(self) -> str:
        """How the user would name it."""
        return f"{self.store.url}/{self._name}"

    def read_into(self, offset: int, view: memoryview, /) -> None:
        """As ``FileReader.read_into``."""
        with self._reading(view) as reader:
            reader.read_into(offset, view)

    def read_blocks_into(self, view: memoryview, payload: Payload, start: int, /) -> None:
        """As ``FileReader.read_blocks_into``."""
        with self._reading(view) as reader:
            reader.read_blocks_into(view, payload, start)

    def read_together(self, offset: int, view: memoryview, payloads: Sequence[Payload]) -> None:
        """As ``FileReader.read_together``."""
        with self._reading(view) as reader:
            reader.read_together(offset, view, payloads)

    def read_neighbours(
        self, offset: int, view: memoryview, payloads: Callable[[], Sequence[Payload]]
    ) -> None:
        """Fill ``view`` with small items from ``offset`` on.

        A store that sends bytes over a network is asked again if they do not agree with what ``payloads``
        returns. Items that are still damaged raise nothing here: the caller checks each item, and can name
        its key.
        """
        if self.store.traits.request_nbytes and (known := payloads()):
            with contextlib.suppress(ChecksumError):
                self.read_together(offset, view, known)
        else:
            self.read_into(offset, view)

    @contextlib.contextmanager
    def _reading(self, view: memoryview) -> Iterator[FileReader]:
        """Read into ``view`` in a with-block, and report its bytes."""
        with self._files.use(self._name) as reader:
            yield reader
        if self._files.progress is not None:
            for at in range(0, len(view), STRIDE):
                self._files.progress.advance(min(STRIDE, len(view) - at))
