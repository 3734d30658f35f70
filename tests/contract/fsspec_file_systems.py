"""File systems of fsspec that behave as some do: refuse, say nothing, remember too much, fail half-way."""

import io
import os
from typing import Any, ClassVar

from fsspec.dircache import DirCache
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile


def forget_memory() -> None:
    """Remove all files of ``memory://``: this process would keep them."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


class OtherLocalFileSystem(LocalFileSystem):  # type: ignore[misc]
    """Files of the disk under URLs of its own, in words of its own: nothing is known of it."""

    protocol = "other"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(super()._strip_protocol(os.fspath(path).removeprefix("other://")))


class RefusingFileSystem(OtherLocalFileSystem):
    """Whose rename refuses to replace a file, as that of smb."""

    protocol = "refusing"

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.exists(path2):
            raise FileExistsError(path2)
        super().mv(path1, path2, **kwargs)


class SilentFileSystem(OtherLocalFileSystem):
    """Whose rename does nothing where it would replace a file, and does not say so, as that of webhdfs."""

    protocol = "silent"

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if not self.exists(path2):
            super().mv(path1, path2, **kwargs)


class WebFileSystem(OtherLocalFileSystem):
    """Which shows files and no folders, and renames nothing, as most web servers."""

    protocol = "web"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(super()._strip_protocol(os.fspath(path).removeprefix("web://")))

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        error = RuntimeError(f"403, Forbidden: {path}")
        error.status = 403  # type: ignore[attr-defined]
        raise error

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        raise NotImplementedError


class RememberingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Answers from a listing as long as it has one, as those of object stores."""

    protocol = "remembering"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.dircache = DirCache()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("remembering://")))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            self.dircache[path] = super().ls(path, detail=True)
        entries = self.dircache[path]
        return list(entries) if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if self._parent(path) not in self.dircache:
            return dict(super().info(path))
        for entry in self.dircache[self._parent(path)]:
            if entry["name"] == path:
                return dict(entry)
        raise FileNotFoundError(path)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.pop(path, None)


class UploadingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Files are uploaded in parts and appear when their stream is closed, as in object stores."""

    protocol = "s3"  # known to replace files in one step
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False

    completed: ClassVar[list[str]] = []
    discarded: ClassVar[list[str]] = []
    deleted: ClassVar[list[str]] = []
    fail_at: ClassVar[str] = ""

    @classmethod
    def forget(cls) -> None:
        for kept in (cls.store, cls.completed, cls.discarded, cls.deleted):
            kept.clear()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("s3://")))

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode == "rb" or "data" in kwargs:
            return super()._open(path, mode, **kwargs)
        return _Upload(self, path, mode, block_size=kwargs["block_size"] or "default")

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        if self.fail_at == "put":
            raise ConnectionError("the put failed")
        super().pipe_file(path, value, **kwargs)

    def rm_file(self, path: str) -> None:
        self.deleted.append(os.path.basename(path))
        super().rm_file(path)


class _Upload(AbstractBufferedFile):  # type: ignore[misc]
    def _initiate_upload(self) -> None:
        self.parts = io.BytesIO()

    def _upload_chunk(self, final: bool = False) -> bool:
        if self.fs.fail_at == "upload":
            raise ConnectionError("the upload failed")
        self.parts.write(self.buffer.getvalue())
        if final:
            self.fs.completed.append(os.path.basename(self.path))
            MemoryFileSystem.pipe_file(self.fs, self.path, self.parts.getvalue())
        return True

    def discard(self) -> None:
        self.fs.discarded.append(os.path.basename(self.path))
