"""Checkpoints in what fsspec reaches, under torch's names."""

import contextlib
import io
import os
from collections.abc import Generator, Sequence
from dataclasses import fields
from typing import Any

from holdfast._file_system import FileSystemBase
from holdfast._io.fsspec_files import FsspecFiles, connect
from holdfast._storage.store_writer import DEFAULT_BUDGET
from holdfast.errors import UsageError
from holdfast.extension import StreamTransformExtension
from holdfast.filesystem import FileSystemReader, FileSystemWriter, SerializationFormat

__all__ = ["FileSystem", "FsspecReader", "FsspecWriter"]


class FileSystem(FileSystemBase):
    """Any file system of fsspec. ``init_path`` comes first: it finds out which one.

    Listings are never answered from what fsspec remembers of a folder.

    Attributes:
        fs: The ``fsspec.AbstractFileSystem``; None until ``init_path``.
    """

    def __init__(self) -> None:
        self.fs: Any = None
        self._options: dict[str, Any] = {}

    @property
    def _files(self) -> FsspecFiles:
        if self.fs is None:
            raise UsageError("this file system does not know its place yet; call init_path first")
        return FsspecFiles(self.fs)

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """Open a file. If an exception leaves the with-block, a file that was being written is removed."""
        with self._files.create_stream(os.fspath(path), mode) as stream:
            yield stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """The path of ``suffix`` in the folder ``path``."""
        return os.path.join(path, suffix)

    def init_path(self, path: str | os.PathLike[str], **kwargs: Any) -> str | os.PathLike[str]:
        """Find the file system of ``path``, and return ``path``.

        Args:
            path: A URL, or the path of a local folder.
            kwargs: What the file system is made with, as in ``fsspec.core.url_to_fs``. Later calls without
                any use these again.

        Raises:
            UsageError: There is no such file system, or a package that it needs is not installed.
        """
        self._options = kwargs or self._options
        self.fs = connect(os.fspath(path), **self._options)
        return path

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Give a file another name. Raises OSError if it has the old one afterwards."""
        self._files.rename(os.fspath(path), os.fspath(new_path))

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make a folder and those above it; one that exists is fine."""
        self._files.mkdir(os.fspath(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether fsspec knows such a place, and can be used for it. Path objects are for local storages."""
        if isinstance(checkpoint_id, os.PathLike):
            return False
        try:
            connect(checkpoint_id)
        except UsageError:
            return False
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Whether there is something of that name. Raises OSError if that cannot be known."""
        return self._files.exists(os.fspath(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Remove a file; a missing one is fine."""
        self._files.rm_file(os.fspath(path))

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        """The paths of what is in a folder."""
        return self._files.ls(os.fspath(path))


class FsspecWriter(FileSystemWriter):
    """Writes a checkpoint to a URL that fsspec knows: ``FileSystemWriter`` with options for fsspec.

    What it guarantees depends on the file system: see ``holdfast._io.fsspec_store.FsspecStore``.

    Args:
        path: The URL of the checkpoint, or the path of a local folder.
        single_file_per_rank, sync_files, thread_count, per_thread_copy_ahead, overwrite, _extensions,
        serialization_format, torch_compatible, memory_budget: As for ``FileSystemWriter``.
        kwargs: What the file system is made with, as in ``fsspec.core.url_to_fs``: keys, hosts, endpoints.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        *,
        torch_compatible: bool = True,
        memory_budget: int = DEFAULT_BUDGET,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            path,
            single_file_per_rank,
            sync_files,
            thread_count,
            per_thread_copy_ahead,
            overwrite=overwrite,
            _extensions=_extensions,
            serialization_format=serialization_format,
            torch_compatible=torch_compatible,
            memory_budget=memory_budget,
        )
        self.fs: FileSystem = FileSystem()
        self.path = self.fs.init_path(path, **kwargs)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether fsspec knows such a place."""
        return FileSystem.validate_checkpoint_id(checkpoint_id)


_READER_OPTIONS = {option.name for option in fields(FileSystemReader) if option.init} - {"path"}


class FsspecReader(FileSystemReader):
    """Reads a checkpoint from a URL that fsspec knows: ``FileSystemReader`` with options for fsspec.

    Args:
        path: The URL of the checkpoint, or the path of a local folder.
        kwargs: The options of ``FileSystemReader``, such as ``verify`` and ``thread_count``. All others are
            what the file system is made with, as in ``fsspec.core.url_to_fs``: keys, hosts, endpoints.
    """

    def __init__(self, path: str | os.PathLike[str], **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _READER_OPTIONS & kwargs.keys()}
        super().__init__(path, **options)
        self.fs: FileSystem = FileSystem()
        self.path = self.fs.init_path(path, **kwargs)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether fsspec knows such a place."""
        return FileSystem.validate_checkpoint_id(checkpoint_id)
