"""torch's small interface of a file system, for those who extend it; local folders do not go through it."""

import contextlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import cast

from holdfast._io.fsspec_store import open_fsspec
from holdfast._io.page_cache import PageCache
from holdfast._io.places import local_path, open_place
from holdfast._io.store import ByteStore
from holdfast._io.stream_store import StreamStore

__all__ = ["FileSystem", "FileSystemBase", "open_file_system"]


class FileSystemBase(ABC):
    """What a storage needs of a file system, in torch's terms: whole streams, and names."""

    @contextlib.contextmanager
    @abstractmethod
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """Open a file; the stream is closed when the with-block ends."""
        yield io.BytesIO()

    @abstractmethod
    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str | os.PathLike[str]:
        """The path of ``suffix`` in the folder ``path``."""

    @abstractmethod
    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Give a file another name, replacing what has that name."""

    @abstractmethod
    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """The path in the form that the other methods take."""

    @abstractmethod
    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make a folder and those above it; one that exists is fine."""

    @classmethod
    @abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this file system serves such a place."""

    @abstractmethod
    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Whether there is something of that name."""

    @abstractmethod
    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Remove a file."""


class FileSystem(FileSystemBase):
    """The local file system. It has no state: one that comes back from another process is the same."""

    def __eq__(self, other: object) -> bool:
        return self is other or type(self) is type(other) is FileSystem

    def __hash__(self) -> int:
        return hash(type(self)) if type(self) is FileSystem else id(self)

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file."""
        with Path(path).open(mode) as stream:
            yield cast("io.IOBase", stream)

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str | os.PathLike[str]:
        """The path of ``suffix`` in the folder ``path``."""
        return Path(path) / suffix

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Give a file another name, replacing what has that name."""
        Path(path).replace(new_path)

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """A ``Path``; a URL stays what it is."""
        return path if local_path(path) is None else Path(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make a folder and those above it."""
        Path(path).mkdir(parents=True, exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path and not a URL; whether it can be written to is not asked."""
        return isinstance(checkpoint_id, os.PathLike) or "://" not in str(checkpoint_id)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Whether there is something of that name."""
        return Path(path).exists()

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Remove a file."""
        Path(path).unlink()

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        """The paths of what is in a folder."""
        return [str(entry) for entry in Path(path).iterdir()]


_LOCAL = ("holdfast._file_system", "torch.distributed.checkpoint.filesystem")
_FSSPEC = ("holdfast._fsspec_filesystem", "torch.distributed.checkpoint._fsspec_filesystem")


def open_file_system(
    fs: FileSystemBase, path: str | os.PathLike[str], *, page_cache: PageCache = "auto"
) -> ByteStore:
    """The store of a folder of a file system.

    Only the file systems as they are, ours and torch's, have stores of their own: the local ones, and those
    of fsspec. Any other class may have overridden what writing means, and is used through its streams.

    Raises:
        UsageError: ``path`` is a URL that no store serves, and ``fs`` the local file system.
    """
    kind = type(fs)
    home = kind.__module__ if kind.__qualname__ == "FileSystem" else ""
    if home in _LOCAL:
        return open_place(path, page_cache=page_cache)
    inner = getattr(fs, "fs", None)  # None until ``init_path``
    if home in _FSSPEC and inner is not None:
        return open_fsspec(inner, os.fspath(path), page_cache=page_cache)
    return StreamStore(fs, path)
