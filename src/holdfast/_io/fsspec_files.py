"""Owns the calls of an fsspec file system: none is answered from a stale listing or fails in silence."""

import contextlib
import errno
import importlib.util
import os
import threading
from collections.abc import Iterator
from typing import Any

from holdfast.errors import StorageError, UsageError

FileSystem = Any
"""An ``fsspec.AbstractFileSystem``. fsspec is optional, and has no types."""

_ATOMIC_PUT = frozenset({"memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
"""Where ``pipe_file`` shows a file whole or not at all, and leaves the old one until then."""

_ANY_THREAD = frozenset({"file", "local", "hdfs", "arrow_hdfs"})
"""What several threads may use at once, besides all that is asynchronous inside.

Others may have one connection (ftp), or one position in a file for all who read it (memory).
"""

_CACHES = frozenset({"simplecache", "filecache", "blockcache", "cached"})

_LISTS_NOTHING = frozenset({401, 403, 405})
"""What web servers answer who show files and no folders."""

_listing = threading.Lock()
_turns: dict[type, threading.RLock] = {}


def has_fsspec() -> bool:
    """Whether fsspec is installed."""
    return importlib.util.find_spec("fsspec") is not None


def knows_scheme(scheme: str) -> bool:
    """Whether fsspec is installed and knows the URLs of a scheme, whatever else it needs to open them."""
    if not has_fsspec():
        return False
    from fsspec.registry import get_filesystem_class  # noqa: PLC0415 - optional, and slow to import

    try:
        get_filesystem_class(scheme)
    except ValueError:
        return False
    except ImportError:
        pass  # ``connect`` tells what to install
    return True


def connect(url: str, **options: Any) -> FileSystem:
    """The file system of a URL, which may be a chain (``zip://::s3://bucket/run.zip``).

    Args:
        url: The URL; a path means the local file system.
        options: What the file system is made with, as in ``fsspec.core.url_to_fs``.

    Raises:
        UsageError: fsspec, or what it needs for this URL, is not installed; or it does not know the URL.
        StorageError: It connects at once, and nobody answers.
    """
    if not has_fsspec():
        raise UsageError(
            f"{url}: needs fsspec, which is not installed: pip install holdfast[fsspec]", path=url
        )
    from fsspec.core import url_to_fs  # noqa: PLC0415 - optional, and slow to import

    _refuse_caches(url)
    try:
        return url_to_fs(url, **options)[0]
    except ImportError as error:
        raise UsageError(f"{url}: fsspec needs another package for it: {error}", path=url) from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"{url}: fsspec cannot open it: {error}", path=url) from error
    except OSError as error:
        raise StorageError(f"{url}: cannot be reached through fsspec: {error}", path=url) from error


def _refuse_caches(url: str) -> None:
    """Raise UsageError for a chain with a cache in it."""
    found = next((part for part in url.split("::") if part.partition(":")[0] in _CACHES), None)
    if "::" in url and found is not None:
        raise UsageError(
            f"{url}: a cache of files ({found.partition(':')[0]}) does not notice that a checkpoint was "
            "replaced, so that a load could get the old one or a mix. Name the place without it.",
            path=url,
        )


def folder_of(fs: FileSystem, url: str) -> str:
    """The path of a URL in its file system.

    Raises:
        UsageError: The URL goes through a cache.
    """
    _refuse_caches(url)
    path: str = fs._strip_protocol(url.partition("::")[0])  # noqa: SLF001 - fsspec has no other name for it
    return path.rstrip("/")


def is_one_of(fs: FileSystem, protocols: frozenset[str]) -> bool:
    """Whether a file system serves URLs of one of these protocols."""
    own = fs.protocol
    return not protocols.isdisjoint([own] if isinstance(own, str) else own)


def puts_whole_files(fs: FileSystem) -> bool:
    """Whether ``pipe_file`` replaces a file in one step."""
    return is_one_of(fs, _ATOMIC_PUT)


def for_threads(fs: FileSystem) -> FileSystem:
    """``fs`` so that any thread may call it: as it is, or with calls that wait for each other."""
    if fs.async_impl or is_one_of(fs, _ANY_THREAD):
        return fs
    # By class: fsspec makes an object for each thread, and these may share what must not be shared.
    return OneAtATime(fs, _turns.setdefault(type(fs), threading.RLock()))


class OneAtATime:
    """A file system, or an open file of one, whose methods are called by one thread at a time."""

    def __init__(self, target: Any, lock: threading.RLock) -> None:
        self.__dict__.update(_target=target, _lock=lock)

    def open(self, *args: Any, **kwargs: Any) -> "OneAtATime":
        """Open a file, which takes part in the same order."""
        with self._lock:
            return OneAtATime(self._target.open(*args, **kwargs), self._lock)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                return value(*args, **kwargs)

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target, name, value)


class FsspecFiles:
    """The files of an fsspec file system, in torch's terms: whole streams, and names.

    Every look at names and sizes drops what the file system remembers of the folder.

    Args:
        fs: The file system.
    """

    def __init__(self, fs: FileSystem) -> None:
        self.fs = fs

    @contextlib.contextmanager
    def create_stream(self, path: str, mode: str, *, block_size: int | None = None) -> Iterator[Any]:
        """Open a file. If an exception leaves the with-block, a file that was being written is gone."""
        with self._refusals(path) if "r" not in mode else contextlib.nullcontext():
            stream = self.fs.open(path, mode, block_size=block_size)
        try:
            yield stream
            stream.close()  # the file may become visible here, and here an upload may fail
        except BaseException:
            if "r" in mode:
                stream.close()
            else:
                self._discard(stream, path)
            raise

    def _discard(self, stream: Any, path: str) -> None:
        """Stop writing a file, and remove it. Closing the stream of an upload would complete it."""
        with contextlib.suppress(Exception):  # has no upload to stop
            stream.discard()
        with contextlib.suppress(Exception):
            try:
                stream.closed = True
            except AttributeError:
                stream.close()
        with contextlib.suppress(Exception):  # the failure that led here is what the caller must see
            self.rm_file(path)

    def concat_path(self, path: str, suffix: str) -> str:
        """The path of ``suffix`` in the folder ``path``."""
        return f"{path.rstrip('/')}/{suffix}"

    def rename(self, path: str, new_path: str) -> None:
        """Give a file another name.

        Raises:
            OSError: The file has its old name still. Some file systems say nothing if the new name is taken.
        """
        try:
            self.fs.mv(path, new_path)
        except NotImplementedError as error:
            raise StorageError(
                f"{path}: fsspec's file system {self.fs.protocol} cannot rename files, which the commit of a "
                "checkpoint needs. Save to a folder, and copy the checkpoint.",
                path=path,
            ) from error
        if self.exists(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path, None, new_path)

    def mkdir(self, path: str) -> None:
        """Make a folder and those above it; one that exists is fine."""
        with self._refusals(path):
            self.fs.makedirs(path, exist_ok=True)

    @contextlib.contextmanager
    def _refusals(self, path: str) -> Iterator[None]:
        """Raise StorageError for what a file system that only reads answers: anything, often no words."""
        try:
            yield
        except (NotImplementedError, ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise StorageError(
                f"{path}: fsspec's file system {self.fs.protocol} could not be written to: "
                f"{str(error) or type(error).__name__}. If it only reads, save to a folder, and "
                "copy the checkpoint.",
                path=path,
            ) from error

    def look(self, path: str) -> dict[str, Any] | None:
        """What the file system tells of a file or folder; None if there is nothing of that name.

        Raises:
            OSError: It cannot be known, because the network fails, say. ``fs.exists`` would be False.
        """
        folder = self.fs._parent(path)  # noqa: SLF001 - fsspec has no other name for it
        for _ in range(2):
            self.fs.invalidate_cache(folder)
            try:
                found: dict[str, Any] = self.fs.info(path)
            except (FileNotFoundError, NotADirectoryError):
                # Another thread's listing, from before the file was made, may have been remembered meanwhile.
                if not getattr(self.fs, "dircache", None):
                    break
            else:
                return found
        return None

    def exists(self, path: str) -> bool:
        """Whether there is something of that name."""
        return self.look(path) is not None

    def rm_file(self, path: str) -> None:
        """Remove a file; a missing one is fine. Unlike ``fs.rm`` it takes ``[`` and ``*`` literally."""
        try:
            self.fs.rm_file(path)
        except FileNotFoundError:
            pass
        except Exception:
            if self.exists(path):
                raise

    def entries(self, path: str) -> list[dict[str, Any]]:
        """What is in a folder, with names as full paths; nothing if there is no such folder."""
        with _listing:
            self.fs.invalidate_cache(path)
            try:
                found: list[dict[str, Any]] = self.fs.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
            except Exception as error:
                # A web server that shows files and no folders. Nobody writes there.
                if getattr(error, "status", None) not in _LISTS_NOTHING:
                    raise
                return []
            finally:
                self.fs.invalidate_cache(path)
        return found

    def ls(self, path: str) -> list[str]:
        """The paths of what is in a folder."""
        return [entry["name"] for entry in self.entries(path)]
