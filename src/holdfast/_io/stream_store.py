"""Owns checkpoints in a file system of streams: torch's ``FileSystemBase``, and so what fsspec reaches."""

import contextlib
import errno
import os
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from typing_extensions import Buffer

from holdfast._format.names import temporary_name
from holdfast._io.blocks import BlockSums
from holdfast._io.file_access import FileReader, FileWriter
from holdfast._io.store import ByteStore, StoreTraits, check_name, existing_file, taken_name
from holdfast._io.streams import byte_view
from holdfast.errors import CheckpointNotFoundError, StorageError, UnsafeMetadataError

_Path = Any


class StreamFileSystem(Protocol):
    """What a ``StreamStore`` asks of a file system. A method ``ls(path)`` may give the paths in a folder."""

    def create_stream(self, path: _Path, mode: str) -> AbstractContextManager[Any]: ...
    def concat_path(self, path: _Path, suffix: str) -> _Path: ...
    def rename(self, path: _Path, new_path: _Path) -> None: ...
    def mkdir(self, path: _Path) -> None: ...
    def exists(self, path: _Path) -> bool: ...
    def rm_file(self, path: _Path) -> None: ...


class StreamStore(ByteStore):
    """A folder of somebody's file system.

    It promises what the file system does. ``replace`` is as atomic as ``rename`` there. If ``rename`` refuses
    to replace a file, the old file is renamed first, and a crash in between leaves neither under its name.
    A file is durable when its stream is closed; a stream with a descriptor is flushed to disk before. If
    there is no ``ls``, saves into the folder do not know of each other.

    Args:
        fs: The file system.
        path: The folder, in the form that ``fs`` takes.
    """

    def __init__(self, fs: StreamFileSystem, path: str | os.PathLike[str]) -> None:
        self.url = str(path)
        self.traits = StoreTraits(writer_nbytes=1 << 20, lists_sizes=False)
        self._fs = fs
        self._folder: _Path = path

    def _path(self, name: str) -> _Path:
        return self._fs.concat_path(self._folder, name)

    @property
    def can_list(self) -> bool:
        """Whether the file system has ``ls``."""
        return callable(getattr(self._fs, "ls", None))

    def make(self) -> None:
        """Make the folder; see ByteStore."""
        self._fs.mkdir(self._folder)

    def names(self) -> set[str]:
        """What is in the folder, folders included if the file system lists them."""
        if not self.can_list:
            raise NotImplementedError(f"{self.url}: {type(self._fs).__name__} has no ls()")
        try:
            found: Iterable[str] = self._fs.ls(self._folder)  # type: ignore[attr-defined]
            return {str(path).rstrip("/").rpartition("/")[2] for path in found}
        except FileNotFoundError:
            return set()

    def list(self) -> dict[str, int]:
        """The name and size of every file; opens each of them."""
        sizes = {}
        for name in self.names():
            with contextlib.suppress(CheckpointNotFoundError, StorageError), self.open(name) as file:
                sizes[name] = file.nbytes
        return sizes

    def exists(self, name: str) -> bool:
        """Whether there is something of that name."""
        return bool(self._fs.exists(self._path(check_name(name))))

    def create(self, name: str, *, nbytes_hint: int | None = None, durable: bool = True) -> FileWriter:
        """Start a new file; see ByteStore."""
        path = self._path(check_name(name))
        if self._fs.exists(path):
            raise taken_name(str(path))
        return _StreamWriter(self._fs, path, self._create_stream(path, nbytes_hint), durable=durable)

    def _create_stream(self, path: _Path, nbytes_hint: int | None) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Open a new file that will have about so many bytes."""
        return self._fs.create_stream(path, "wb")

    def open(self, name: str) -> FileReader:
        """Open a file for reading; see ByteStore."""
        path = self._path(check_name(name, error=UnsafeMetadataError))
        try:
            return _StreamReader(self._fs, path)
        except IsADirectoryError as error:
            raise StorageError(f"{path}: is a folder.", path=str(path)) from error
        except Exception as error:
            if not isinstance(error, FileNotFoundError) and not self._is_missing(name, error):
                raise
            raise CheckpointNotFoundError(f"{path}: there is no such file.", path=str(path)) from error

    def _is_missing(self, name: str, error: Exception) -> bool:
        """Whether an error that is not FileNotFoundError means that a file is missing.

        An OSError does not: with many file systems ``exists`` is False whenever the network fails.
        """
        if isinstance(error, OSError):
            return False
        return name not in self.names() if self.can_list else not self.exists(name)

    def replace(self, name: str, *pieces: Buffer, durable: bool = True, overwrite: bool = True) -> None:
        """Put the pieces under ``name``; see ByteStore, and above."""
        path, temporary = self._path(check_name(name)), self._path(temporary_name(name))
        if not overwrite and self._fs.exists(path):
            raise existing_file(str(path))
        opened = self._fs.create_stream(temporary, "wb")
        with _StreamWriter(self._fs, temporary, opened, durable=durable) as file:
            for piece in pieces:
                file.write(piece)
        try:
            try:
                self._rename(temporary, path)
            except Exception:
                if not (self._fs.exists(path) and self._fs.exists(temporary)):
                    raise
                self._exchange(temporary, path, self._path(temporary_name(name)))
        except BaseException:
            _remove(self._fs, temporary)
            raise

    def _exchange(self, temporary: _Path, path: _Path, aside: _Path) -> None:
        """Put a file in the place of another where ``rename`` refuses to replace; undone if it fails."""
        self._rename(path, aside)
        try:
            self._rename(temporary, path)
        except BaseException:
            self._fs.rename(aside, path)
            raise
        _remove(self._fs, aside)

    def _rename(self, path: _Path, new_path: _Path) -> None:
        """Give a file another name. Some file systems say nothing if they do not replace the one there."""
        self._fs.rename(path, new_path)
        if self._fs.exists(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path), None, str(new_path))

    def delete(self, names: Iterable[str]) -> None:
        """Remove files; a missing one is fine."""
        failures = [_remove(self._fs, path) for path in [self._path(check_name(name)) for name in names]]
        for failure in filter(None, failures):
            raise failure

    def sync(self) -> None:
        """Nothing: the names of files are as durable as the file system makes them."""


def _remove(fs: StreamFileSystem, path: _Path) -> Exception | None:
    """Remove a file. A missing one is fine; any other failure is returned."""
    try:
        if fs.exists(path):
            fs.rm_file(path)
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 - a stranger's code
        return error
    return None


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        # What a descriptor answers that is no file: a pipe, a socket.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.EROFS}:
            raise


class _StreamWriter(FileWriter):
    def __init__(
        self, fs: StreamFileSystem, path: _Path, opened: AbstractContextManager[Any], *, durable: bool
    ) -> None:
        super().__init__(str(path))
        self._fs = fs
        self._path = path
        self._durable = durable
        self._opened = opened
        self._stream = opened.__enter__()

    def _append(self, view: memoryview, sums: BlockSums | None) -> None:
        if sums is not None:
            sums.update(view)
        while view:
            # A raw stream may take less than it is given; one that does not say takes all.
            took = self._stream.write(view)
            if took == 0:
                raise OSError(f"{self.path}: the stream took no bytes and gave no reason")
            view = view[took if took is not None else len(view) :]

    def _complete(self) -> None:
        if self._durable:
            self._stream.flush()
            descriptor = None
            # Streams that are no files of this machine have no descriptor.
            with contextlib.suppress(AttributeError, OSError):
                descriptor = self._stream.fileno()
            if descriptor is not None:
                _sync(descriptor)
        self._opened.__exit__(None, None, None)

    def _discard(self) -> None:
        stopped = StorageError(f"{self.path}: the write was given up", path=self.path)
        # Their stream may remove the file by itself when an exception passes, or raise on the way.
        with contextlib.suppress(Exception):
            self._opened.__exit__(type(stopped), stopped, None)
        _remove(self._fs, self._path)


class _StreamReader(FileReader):
    """Reads by seeking in streams: one for each thread that reads at the same time."""

    def __init__(self, fs: StreamFileSystem, path: _Path) -> None:
        self.path = str(path)
        self._fs = fs
        self._path = path
        self._lock = threading.Lock()
        self._idle: list[tuple[AbstractContextManager[Any], Any]] = []
        opened, stream = self._open()
        self._idle.append((opened, stream))
        self.nbytes: int = stream.seek(0, os.SEEK_END) or stream.tell()

    def _open(self) -> tuple[AbstractContextManager[Any], Any]:
        opened = self._fs.create_stream(self._path, "rb")
        return opened, opened.__enter__()

    def read_into(self, offset: int, buffer: Buffer) -> None:
        view = byte_view(buffer)
        self._check_range(offset, len(view))
        with self._lock:
            found = self._idle.pop() if self._idle else None
        opened, stream = found or self._open()
        try:
            stream.seek(offset)
            self._fill_from(lambda _, nbytes: stream.read(nbytes), offset, view)
        finally:
            with self._lock:
                self._idle.append((opened, stream))

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for opened, _ in idle:
            opened.__exit__(None, None, None)
