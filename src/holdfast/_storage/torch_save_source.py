"""Owns a torch.save file as a source of two files: itself, and one with what it has in another form.

Tensors whose elements lie in row-major order are ranges of the file itself. All else that it holds, values
that are not tensors and tensors with other strides, gets a place in the second file, which is made when it is
read. So whatever reads checkpoints reads this, by ranges.
"""

import bisect
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from typing_extensions import Buffer

from holdfast._io.blocks import crc32, crc32_combine
from holdfast._io.file_access import FileReader
from holdfast._io.store import FileSource
from holdfast._io.streams import byte_view
from holdfast._storage.torch_save_contents import SavedContents, StoredRun, read_contents
from holdfast.errors import CheckpointNotFoundError, ChecksumError, UnsafeMetadataError


class TorchSaveSource(FileSource):
    """A file that ``torch.save`` wrote, in a place, seen as a checkpoint of two files.

    Args:
        store: The place.
        name: The file in it.
        safe_globals: What values may need besides data types.
        allow_pickle: Let the file import and call whatever it names.
        verify: Compare the checksum of each storage that is read whole, in any number of pieces.
    """

    def __init__(
        self,
        store: FileSource,
        name: str,
        *,
        safe_globals: Sequence[Callable[..., Any] | type] = (),
        allow_pickle: bool = False,
        verify: bool = True,
    ) -> None:
        self.url = store.url
        self.traits = store.traits
        self.name = name
        self.others_name = f"{name}#values"
        self._inner = store
        self._safe_globals = tuple(safe_globals)
        self._allow_pickle = allow_pickle
        self._verify = verify
        self._lock = threading.Lock()

    @property
    def path(self) -> str:
        """How the user would name the file."""
        return f"{self.url}/{self.name}"

    @property
    def contents(self) -> SavedContents:
        """What the file holds; read once.

        Raises:
            CheckpointNotFoundError: There is no such file.
            MetadataFormatError: It is not a file that ``torch.save`` writes, or does not hold a dict.
            IntegrityError: It is damaged.
            UnsafeMetadataError: What it holds needs something that is not allowed.
        """
        with self._lock:
            return self._contents

    @cached_property
    def _contents(self) -> SavedContents:
        with self._inner.open(self.name) as file:
            return read_contents(
                file, self.path, safe_globals=self._safe_globals, allow_pickle=self._allow_pickle
            )

    @cached_property
    def _check(self) -> "_StorageCheck | None":
        return _StorageCheck(self.path, self._contents.storages) if self._verify else None

    def list(self) -> dict[str, int]:
        return {self.name: self.contents.nbytes, self.others_name: self.contents.others_nbytes}

    def exists(self, name: str) -> bool:
        return name == self.others_name or (name == self.name and self._inner.exists(name))

    def open(self, name: str) -> FileReader:
        if name not in {self.name, self.others_name}:
            raise CheckpointNotFoundError(f"{self.url}/{name} is not part of {self.path}", path=self.path)
        contents, inner = self.contents, self._inner.open(self.name)
        with self._lock:
            file = _CheckedReader(self.path, inner, self._check)
        return file if name == self.name else _OthersReader(self.path, file, contents)

    def expect(self, nbytes: int) -> None:
        self._inner.expect(nbytes)


class _StorageCheck:
    """Compares the checksum of a storage when all of it has been read, in whichever order and pieces."""

    def __init__(self, path: str, storages: Sequence[StoredRun]) -> None:
        self._path = path
        self._storages = [run for run in storages if run.crc32 is not None and run.nbytes]
        self._starts = [run.start for run in self._storages]
        self._pieces: dict[int, dict[int, tuple[int, int]]] = {}
        self._lock = threading.Lock()

    def add(self, offset: int, view: memoryview) -> None:
        """Take note of bytes of the file.

        Raises:
            ChecksumError: They complete a storage, and are not the ones that were written.
        """
        number = max(0, bisect.bisect_right(self._starts, offset) - 1)
        end = offset + len(view)
        while number < len(self._storages) and self._starts[number] < end:
            run = self._storages[number]
            begin, stop = max(offset, run.start), min(end, run.start + run.nbytes)
            if begin < stop:
                found = crc32(view[begin - offset : stop - offset])
                self._add_piece(number, begin - run.start, stop - begin, found)
            number += 1

    def _add_piece(self, number: int, begin: int, nbytes: int, found: int) -> None:
        run = self._storages[number]
        with self._lock:
            pieces = self._pieces.setdefault(number, {})
            pieces[begin] = nbytes, found
            at = whole = 0
            if sum(length for length, _ in pieces.values()) < run.nbytes:
                return
            for start, (length, piece) in sorted(pieces.items()):
                if start != at:
                    return  # some bytes have come twice, others not yet
                whole, at = crc32_combine(whole, piece, length), at + length
            del self._pieces[number]
        if whole != run.crc32:
            raise ChecksumError(
                f"{self._path}: the {run.nbytes} bytes at {run.start} are not the ones that were written. "
                "The file is damaged; take another copy of it.",
                path=self._path,
                expected=run.crc32,
                found=whole,
            )


class _CheckedReader(FileReader):
    """Reads the file, and lets what is read be checked."""

    def __init__(self, path: str, file: FileReader, check: _StorageCheck | None) -> None:
        self.path = path
        self.nbytes = file.nbytes
        self._file = file
        self._check = check

    def read_into(self, offset: int, buffer: Buffer) -> None:
        view = byte_view(buffer)
        self._file.read_into(offset, view)
        if self._check is not None:
            self._check.add(offset, view)

    def close(self) -> None:
        self._file.close()


class _OthersReader(FileReader):
    """Reads the second file, which is made from the first one as it is read."""

    def __init__(self, path: str, file: FileReader, contents: SavedContents) -> None:
        self.path = path
        self.nbytes = contents.others_nbytes
        self._file = file
        self._others = contents.others
        self._starts = [begin for begin, _ in contents.others]

    def read_into(self, offset: int, buffer: Buffer) -> None:
        view = byte_view(buffer)
        self._check_range(offset, len(view))
        while view:
            number = bisect.bisect_right(self._starts, offset) - 1
            begin, what = self._others[number]
            end = self._starts[number + 1] if number + 1 < len(self._starts) else self.nbytes
            part = view[: end - offset]
            if isinstance(what, UnsafeMetadataError):
                raise what
            if isinstance(what, bytes):
                part[:] = what[offset - begin : offset - begin + len(part)]
            else:
                what.read_into(self._file.read_into, offset - begin, part)
            view, offset = view[len(part) :], offset + len(part)

    def close(self) -> None:
        self._file.close()
