"""The files of a place that is looked into: kept open between reads, a bounded number of them."""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast._io.file_access import FileReader
from holdfast._io.store import FileSource
from holdfast.errors import UsageError

_MOST_OPEN = 32


class FileCache:
    """Opens files and keeps those that were used last. Its methods may be called from any thread.

    Args:
        store: The place.
    """

    def __init__(self, store: FileSource) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._open: OrderedDict[str, FileReader] = OrderedDict()
        self._users: dict[int, int] = {}
        self._is_closed = False

    @contextmanager
    def use(self, name: str) -> Iterator[FileReader]:
        """A file, open for as long as the with-block lasts.

        Raises:
            UsageError: ``close`` has been called.
        """
        reader = self._take(name)
        try:
            yield reader
        finally:
            self._give_back(reader)

    def close(self) -> None:
        """Close every file that nobody uses now, and the others when they are given back."""
        with self._lock:
            self._is_closed = True
            idle = [self._open.popitem()[1] for _ in range(len(self._open))]
            idle = [reader for reader in idle if id(reader) not in self._users]
        for reader in idle:
            reader.close()

    def __del__(self) -> None:
        # Descriptors of files are plain numbers, which nobody else closes if a view is only let go of.
        self.close()

    def _take(self, name: str) -> FileReader:
        with self._lock:
            if self._is_closed:
                raise UsageError(f"{self.store.url}: this view is closed", path=self.store.url)
            reader = self._open.get(name)
            if reader is not None:
                self._open.move_to_end(name)
                self._users[id(reader)] = self._users.get(id(reader), 0) + 1
                return reader
        # Not under the lock: to open an object of a bucket is a request.
        reader = self.store.open(name)
        with self._lock:
            self._users[id(reader)] = 1
            if not self._is_closed:
                self._open.setdefault(name, reader)
        return reader

    def _give_back(self, reader: FileReader) -> None:
        with self._lock:
            self._users[id(reader)] -= 1
            if self._users[id(reader)] == 0:
                del self._users[id(reader)]
            dropped = self._drop_oldest()
            if id(reader) not in self._users and reader not in self._open.values() and reader not in dropped:
                dropped.append(reader)
        for each in dropped:
            each.close()

    def _drop_oldest(self) -> list[FileReader]:
        """Forget the files used longest ago that nobody uses, as many as there are too many."""
        idle = [name for name, reader in self._open.items() if id(reader) not in self._users]
        return [self._open.pop(name) for name in idle[: max(0, len(self._open) - _MOST_OPEN)]]
