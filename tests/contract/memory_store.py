"""A store in memory: how little a new kind of store needs."""

import time
from collections.abc import Iterable

from typing_extensions import Buffer

from holdfast._io.blocks import BlockSums
from holdfast._io.file_access import FileReader, FileWriter
from holdfast._io.store import ByteStore, check_name, existing_file
from holdfast._io.streams import byte_view
from holdfast.errors import CheckpointNotFoundError, StorageError, UnsafeMetadataError

_PLACES: dict[str, dict[str, tuple[bytes, int]]] = {}
"""The files of every place with their content and the time of their last change."""


class MemoryStore(ByteStore):
    def __init__(self, url: str) -> None:
        self.url = url
        self._files = _PLACES.setdefault(url, {})

    def make(self) -> None:
        pass

    def create(self, name: str, *, nbytes_hint: int | None = None, durable: bool = True) -> FileWriter:
        if check_name(name) in self._files:
            raise StorageError(f"{self.url}/{name}: exists already", path=f"{self.url}/{name}")
        return _MemoryWriter(self, name)

    def replace(self, name: str, *pieces: Buffer, durable: bool = True, overwrite: bool = True) -> None:
        if check_name(name) in self._files and not overwrite:
            raise existing_file(f"{self.url}/{name}")
        self._files[name] = b"".join(map(byte_view, pieces)), time.time_ns()

    def open(self, name: str) -> FileReader:
        path = f"{self.url}/{check_name(name, error=UnsafeMetadataError)}"
        if name not in self._files:
            raise CheckpointNotFoundError(f"{path}: there is no such file", path=path)
        return _MemoryReader(path, self._files[name][0])

    def exists(self, name: str) -> bool:
        return check_name(name) in self._files

    def list(self) -> dict[str, int]:
        return {name: len(data) for name, (data, _) in self._files.copy().items()}

    def modified_ns(self, name: str) -> int | None:
        return self._files[name][1] if name in self._files else None

    def delete(self, names: Iterable[str]) -> None:
        for name in [check_name(name) for name in names]:
            self._files.pop(name, None)

    def sync(self) -> None:
        pass


class _MemoryWriter(FileWriter):
    def __init__(self, store: MemoryStore, name: str) -> None:
        super().__init__(f"{store.url}/{name}")
        self._store, self._name, self._data = store, name, bytearray()

    def _append(self, view: memoryview, sums: BlockSums | None) -> None:
        self._data += view
        if sums is not None:
            sums.update(view)

    def _complete(self) -> None:
        self._store.replace(self._name, self._data)

    def _discard(self) -> None:
        self._data.clear()


class _MemoryReader(FileReader):
    def __init__(self, path: str, data: bytes) -> None:
        self.path, self.nbytes, self._data = path, len(data), memoryview(data)

    def read_into(self, offset: int, buffer: Buffer) -> None:
        view = byte_view(buffer)
        self._check_range(offset, len(view))
        view[:] = self._data[offset : offset + len(view)]

    def close(self) -> None:
        pass
