"""The files of a place that is looked into: kept open between reads, a bounded number of them."""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast._io.file_access import FileReader
from holdfast._io.store import FileSource
from holdfast.errors import UsageError

_MOST_OPEN = 32


@dataclass(eq=False)
class _UsedFile:
    """A file, and by how many it is used."""

    reader: FileReader
    users: int = 1


class FileCache:
    """Opens files and keeps those that were used last. Its methods may be called from any thread.

    Args:
        store: The place.
    """

    def __init__(self, store: FileSource) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _UsedFile] = OrderedDict()
        self._is_closed = False

    @contextmanager
    def use(self, name: str) -> Iterator[FileReader]:
        """A file, open for as long as the with-block lasts.

        Raises:
            UsageError: ``close`` has been called.
        """
        file = self._take(name)
        try:
            yield file.reader
        finally:
            self._give_back(name, file)

    def close(self) -> None:
        """Close every file that nobody uses now, and the others when they are given back."""
        with self._lock:
            self._is_closed = True
            idle = [file for file in self._open.values() if not file.users]
            self._open.clear()
        for file in idle:
            file.reader.close()

    def __del__(self) -> None:
        # Descriptors of files are plain numbers, which nobody else closes if a view is only let go of.
        self.close()

    def _take(self, name: str) -> _UsedFile:
        with self._lock:
            if self._is_closed:
                raise UsageError(f"{self.store.url}: this view is closed", path=self.store.url)
            file = self._open.get(name)
            if file is not None:
                self._open.move_to_end(name)
                file.users += 1
                return file
        # Not under the lock: to open an object of a bucket is a request.
        file = _UsedFile(self.store.open(name))
        with self._lock:
            if not self._is_closed:
                self._open.setdefault(name, file)
        return file

    def _give_back(self, name: str, file: _UsedFile) -> None:
        with self._lock:
            file.users -= 1
            dropped = self._drop_oldest()
            if not file.users and self._open.get(name) is not file and file not in dropped:
                dropped.append(file)
        for each in dropped:
            each.reader.close()

    def _drop_oldest(self) -> list[_UsedFile]:
        """Forget the files used longest ago that nobody uses, as many as there are too many."""
        idle = [name for name, file in self._open.items() if not file.users]
        return [self._open.pop(name) for name in idle[: max(0, len(self._open) - _MOST_OPEN)]]
