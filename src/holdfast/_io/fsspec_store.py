"""Owns checkpoints in what fsspec reaches: reads of ranges, sizes from listings, the commit that suits."""

import contextlib
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace as with_changes
from functools import partial
from typing import Any

from typing_extensions import Buffer

from holdfast._format.names import parse_data_file
from holdfast._io import pool
from holdfast._io.file_access import FileReader
from holdfast._io.fsspec_files import (
    FileSystem,
    FsspecFiles,
    connect,
    folder_of,
    for_threads,
    is_one_of,
    puts_whole_files,
)
from holdfast._io.local import LocalStore
from holdfast._io.page_cache import PageCache
from holdfast._io.store import Below, ByteStore, FileFacts, check_name, existing_file
from holdfast._io.stream_store import StreamStore
from holdfast._io.streams import byte_view
from holdfast.errors import CheckpointNotFoundError, StorageError, UnsafeMetadataError, UsageError

_REQUEST_NBYTES = 32 << 20
"""The most bytes of one request: fsspec returns them in memory of its own."""
_BLOCK_NBYTES = 16 << 20
"""How much of a file fsspec collects before it sends it."""
_MOST_BLOCKS = 8_000
"""How many of these a file may have. S3 takes 10,000, and a size that was announced is not exact."""
_MOST_FOLDERS = 64
_ATTEMPTS = 3

# What changes with the content of a file, in the words of the many file systems.
_VERSION = (
    *("size", "etag", "ETag", "generation", "version_id", "VersionId", "md5Hash", "content_md5", "ino"),
    *("mtime", "modified", "updated", "last_modified", "LastModified", "modificationTime", "created"),
)


def open_fsspec_url(url: str, *, page_cache: PageCache = "auto") -> ByteStore:
    """The store of a URL that fsspec knows.

    Raises:
        UsageError: fsspec, or what it needs for this URL, is not installed; or it does not know the URL.
    """
    return open_fsspec(connect(url), url, page_cache=page_cache)


def open_fsspec(fs: FileSystem, url: str, *, page_cache: PageCache = "auto") -> ByteStore:
    """The store of a folder of an fsspec file system.

    The local file system as it is means a local folder. A subclass may mean something else by writing.

    Args:
        fs: The file system.
        url: The folder, with or without the protocol.
        page_cache: What to leave in the page cache of this machine, if it is a local folder.

    Raises:
        UsageError: The URL goes through a cache of files, which may be stale.
    """
    from fsspec.implementations.local import LocalFileSystem  # noqa: PLC0415 - optional, and slow to import

    folder = folder_of(fs, url)
    if type(fs) is LocalFileSystem:
        return LocalStore(folder or "/", page_cache=page_cache)
    return FsspecStore(fs, folder, url)


class FsspecStore(StreamStore):
    """A folder of an fsspec file system.

    The commit, ``replace``, depends on what the file system is known to do:

    - S3, Google Cloud Storage, Azure Blob Storage and ``memory``: the file is put under its name in one step
      (``pipe_file``). Readers and crashes find the old file or the new one. When it returns, the service has
      stored it.
    - all others (sftp, smb, hdfs, ...): the file is written under another name, flushed to disk if its stream
      has a descriptor, and renamed (``mv``). It is as atomic as ``mv`` there. If ``mv`` refuses to replace a
      file, or does not do it, the old file is renamed first; a crash between leaves neither under its name.

    The plain local file system is not served here, but by ``LocalStore``: see ``open_fsspec``.

    A read of a file that was replaced since it was opened raises, as far as the file system tells versions
    apart: by an ETag or a generation exactly, by time and size otherwise. If a file system is not known to
    take calls of several threads, they wait for each other. Symbolic links are not files here.

    Args:
        fs: The file system.
        folder: The folder, without the protocol.
        url: How the user names it.
    """

    def __init__(self, fs: FileSystem, folder: str, url: str) -> None:
        self._raw = fs
        self._files = FsspecFiles(for_threads(fs))
        super().__init__(self._files, folder)
        self.url = url
        self._puts_whole_files = puts_whole_files(fs)
        # A block being sent, the next one, and what was given at once.
        self.traits = with_changes(self.traits, writer_nbytes=3 * _BLOCK_NBYTES, lists_sizes=True)
        if fs.async_impl:
            # Each request takes tens of milliseconds, large or small, and they do not slow each other down.
            self.traits = with_changes(
                self.traits, requests_in_flight=16, read_gap_nbytes=1 << 20, read_nbytes=16 << 20
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # Files in memory are those of one process.
        process = os.getpid() if is_one_of(self._raw, frozenset({"memory"})) else None
        return _restore, (self._raw, self._folder, self.url, process)

    def _create_stream(self, path: str, nbytes_hint: int | None) -> AbstractContextManager[Any]:
        blocks = -(-(nbytes_hint or 0) // (_MOST_BLOCKS * _BLOCK_NBYTES))
        return self._files.create_stream(path, "wb", block_size=max(blocks, 1) * _BLOCK_NBYTES)

    def _entries(self) -> dict[str, dict[str, Any]]:
        """What is in the folder, by plain names."""
        start = f"{self._folder}/".lstrip("/")
        found = [(entry["name"].strip("/"), entry) for entry in self._files.entries(self._folder)]
        # Some list the folder itself, as an object without bytes or because it is a file.
        return {path[len(start) :]: entry for path, entry in found if path.startswith(start)}

    def names(self) -> set[str]:
        """The name of every file."""
        return {name for name, entry in self._entries().items() if entry["type"] == "file"}

    def list(self) -> dict[str, int]:
        """The name and size of every file. A file whose size is not listed is left out."""
        return {
            name: entry["size"]
            for name, entry in self._entries().items()
            if entry["type"] == "file" and entry["size"] is not None
        }

    def below(self, name: str | None = None, *, is_brief: bool = False) -> Below:
        """The files and folders of this folder; see FileSource. Asks each folder for its file."""
        entries = self._entries()
        files = {found for found, entry in entries.items() if entry["type"] == "file"}
        folders = [found for found, entry in entries.items() if entry["type"] == "directory"]
        if name is None:
            return Below(files, dict.fromkeys(folders))
        if is_brief:
            folders = sorted(folders)[:_MOST_FOLDERS]
        paths = [self._files.concat_path(self._path(folder), name) for folder in folders]
        jobs = [partial(self._facts_at, path) for path in paths]
        facts = pool.run(jobs, threads=self.traits.requests_in_flight)
        return Below(files, dict(zip(folders, facts, strict=True)))

    def facts(self, name: str) -> FileFacts | None:
        """What the file system tells of a file; see FileSource."""
        return self._facts_at(self._path(check_name(name)))

    def _facts_at(self, path: str) -> FileFacts | None:
        found = self._files.look(path)
        if found is None or found["type"] != "file":
            return None
        modified_ns = None
        with contextlib.suppress(FileNotFoundError, NotImplementedError):
            modified_ns = int(self._files.fs.modified(path).timestamp() * 1e9)
        return FileFacts(found["size"] or 0, modified_ns, "-".join(map(str, _version(found))))

    def remove_if_empty(self) -> None:
        """Remove the folder if nothing is in it; see ByteStore."""
        with contextlib.suppress(
            Exception
        ):  # a stranger's file system may raise anything, or know no folders
            if not self._entries():
                self._files.fs.rmdir(self._folder)

    def exists(self, name: str) -> bool:
        """Whether there is a file of that name."""
        found = self._files.look(self._path(check_name(name)))
        return found is not None and found["type"] == "file"

    def open(self, name: str) -> FileReader:
        """Open a file for reading; see ByteStore."""
        path = self._path(check_name(name, error=UnsafeMetadataError))
        found = self._files.look(path)
        if found is None:
            raise CheckpointNotFoundError(f"{path}: there is no such file.", path=path)
        if found["type"] != "file" or found["size"] is None:
            what = "its size is not known" if found["type"] == "file" else f"is a {found['type']}, not a file"
            raise StorageError(f"{path}: {what}.", path=path)
        file = parse_data_file(name)
        # Data files of ours have names of their own: no save ever replaces one.
        return _RangeReader(self._files, path, found, may_change=file is None or file.save is None)

    def read(self, name: str, *, max_bytes: int) -> bytearray:
        """The whole of a small file; see ByteStore. One that is replaced meanwhile is read again."""
        for _ in range(_ATTEMPTS - 1):
            with contextlib.suppress(_ReplacedError):
                return super().read(name, max_bytes=max_bytes)
        return super().read(name, max_bytes=max_bytes)

    def replace(self, name: str, *pieces: Buffer, durable: bool = True, overwrite: bool = True) -> None:
        """Put the pieces under ``name``; see ByteStore, and above.

        Whether it may be overwritten is asked before: fsspec has no conditional puts.
        """
        if not self._puts_whole_files:
            super().replace(name, *pieces, durable=durable, overwrite=overwrite)
            return
        if not overwrite and self.exists(name):
            raise existing_file(self._path(name))
        self._files.fs.pipe_file(self._path(check_name(name)), b"".join(map(byte_view, pieces)))

    def delete(self, names: Iterable[str]) -> None:
        """Remove files, several at once; a missing one is fine."""
        paths = [self._path(check_name(name)) for name in names]
        jobs: list[Callable[[], Exception | None]] = [partial(self._try_to_delete, path) for path in paths]
        for failure in filter(None, pool.run(jobs, threads=self.traits.requests_in_flight)):
            raise failure

    def _try_to_delete(self, path: str) -> Exception | None:
        try:
            self._files.rm_file(path)
        except Exception as error:  # noqa: BLE001 - a stranger's code; it is raised when all are tried
            return error
        return None


def _restore(fs: FileSystem, folder: str, url: str, process: int | None) -> FsspecStore:
    if process not in {None, os.getpid()}:
        raise UsageError(
            f"{url}: is in the memory of process {process}, and this is another one. Save in a thread: "
            "async_checkpointer_type=AsyncCheckpointerType.THREAD",
            path=url,
        )
    return FsspecStore(fs, folder, url)


class _ReplacedError(StorageError):
    """A file is not the one that was opened."""


class _RangeReader(FileReader):
    """Reads ranges by requests of their own, which any number of threads may make at once."""

    def __init__(self, files: FsspecFiles, path: str, found: dict[str, Any], *, may_change: bool) -> None:
        self.path = path
        self.nbytes = int(found["size"])
        self._files = files
        self._version = _version(found)
        self._may_change = may_change

    def read_into(self, offset: int, buffer: Buffer) -> None:
        view = byte_view(buffer)
        self._check_range(offset, len(view))
        self._fill_from(self._fetch, offset, view)
        if self._may_change:
            self._check_version()

    def _fetch(self, start: int, nbytes: int) -> bytes:
        end = start + min(nbytes, _REQUEST_NBYTES)
        try:
            data: bytes = self._files.fs.cat_file(self.path, start=start, end=end)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"{self.path}: there is no such file any more.", path=self.path
            ) from error
        if not data:
            self._check_version()
        if len(data) > end - start:
            # A web server that knows no ranges sends the whole file.
            if len(data) != self.nbytes or self.nbytes > _REQUEST_NBYTES:
                raise StorageError(
                    f"{self.path}: {end - start} bytes at {start} were asked for, and {len(data)} came: the "
                    "server sends no parts of files. Copy the checkpoint to a folder, and load it there.",
                    path=self.path,
                    expected=end - start,
                    found=len(data),
                )
            data = data[start:end]
        return data

    def _check_version(self) -> None:
        found = self._files.look(self.path)
        if found is None or _version(found) != self._version:
            raise _ReplacedError(
                f"{self.path}: was replaced while it was being read. Load again.", path=self.path
            )


def _version(found: dict[str, Any]) -> list[Any]:
    return [found.get(key) for key in _VERSION]
