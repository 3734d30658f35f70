"""File systems as others write them for torch's FileSystemBase: in memory under URLs, and on the disk."""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import holdfast as hf
from holdfast.filesystem import FileSystem, FileSystemBase

Place = str | os.PathLike[str]


class MemoryFileSystem(FileSystemBase):
    """Has its files in a dictionary, by URLs like ``mem://run/1``; whose rename refuses to replace a file."""

    files: dict[str, bytes] = {}  # noqa: RUF012 - shared by all: it stands for a server

    @contextlib.contextmanager
    def create_stream(self, path: Place, mode: str) -> Iterator[io.IOBase]:
        if mode == "rb":
            if str(path) not in self.files:
                raise FileNotFoundError(path)
            yield io.BytesIO(self.files[str(path)])
            return
        stream = io.BytesIO()
        yield stream
        self.files[str(path)] = stream.getvalue()

    def concat_path(self, path: Place, suffix: str) -> str:
        return f"{path}/{suffix}"

    def rename(self, path: Place, new_path: Place) -> None:
        if str(new_path) in self.files:
            raise FileExistsError(new_path)
        self.files[str(new_path)] = self.files.pop(str(path))

    def init_path(self, path: Place) -> str:
        assert str(path).startswith("mem://"), path
        return str(path)

    def mkdir(self, path: Place) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Place) -> bool:
        return str(checkpoint_id).startswith("mem://")

    def exists(self, path: Place) -> bool:
        return str(path) in self.files

    def rm_file(self, path: Place) -> None:
        del self.files[str(path)]


class ListedMemoryFileSystem(MemoryFileSystem):
    """Lists its files, too."""

    def ls(self, path: Place) -> list[str]:
        return [name for name in list(self.files) if name.startswith(f"{path}/")]


class DiskFileSystem(FileSystem):
    """The local file system, in words of its own: a subclass may mean something else by writing."""

    opened: list[str] = []  # noqa: RUF012 - shared by all instances

    @contextlib.contextmanager
    def create_stream(self, path: Place, mode: str) -> Iterator[io.IOBase]:
        self.opened.append(os.path.basename(path))
        with Path(path).open(mode) as stream:
            yield cast("io.IOBase", stream)


class StreamWriter(hf.FileSystemWriter):
    """As torch's FsspecWriter: sets the file system after ``super().__init__``."""

    def __init__(self, path: Place, fs: Any, **options: Any) -> None:
        super().__init__(path, **options)
        self.fs = fs
        self.path = self.fs.init_path(path)


class StreamReader(hf.FileSystemReader):
    """As torch's FsspecReader."""

    def __init__(self, path: Place, fs: Any, **options: Any) -> None:
        super().__init__(path, **options)
        self.fs = fs
        self.path = self.fs.init_path(path)
