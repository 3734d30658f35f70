"""Owns a checkpoint's folder in a local (or mounted) file system, and its one atomic commit."""

import errno
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice

from typing_extensions import Buffer

from holdfast._format.names import METADATA, is_read_through_links, temporary_name
from holdfast._io.cold_reads import ColdReads
from holdfast._io.local_buffers import BUFFER_NBYTES
from holdfast._io.local_calls import flush_to_disk, naming, write_fully
from holdfast._io.local_claim import claim_folder
from holdfast._io.local_ranges import NEW_FILE, NO_RANGES, LocalRanges, create_file
from holdfast._io.local_reader import LocalReader
from holdfast._io.local_writer import LocalWriter
from holdfast._io.page_cache import PageCache, check_page_cache, room
from holdfast._io.process_identity import this_process
from holdfast._io.store import Below, CacheRoom, Claim, FileFacts, StoreTraits, check_name, existing_file
from holdfast._io.streams import byte_view
from holdfast._io.write_back import BufferOutput
from holdfast.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    NotAFolderError,
    StorageError,
    UnsafeMetadataError,
)

# Without O_NONBLOCK, opening a named pipe that somebody planted would wait for ever.
_OLD = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
# A place may have a hundred thousand files: a bounded look is enough for a message.
_MOST_ENTRIES, _MOST_FOLDERS = 10_000, 1_000
_LOOKED_AT = 16
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class LocalStore(LocalRanges):
    """A folder of a local file system.

    Symbolic links inside the folder are neither followed nor overwritten; only files of safetensors models
    are read through them. The folder itself may be reached through one. Reading needs read access to the
    folder and its files, and nothing more.

    Args:
        path: The folder. It need not exist until ``make``.
        page_cache: What large files leave in the page cache when they are written durably, or read.
    """

    traits = StoreTraits(random_writes=True)

    def __init__(
        self,
        path: "str | os.PathLike[str]",
        *,
        page_cache: PageCache = "auto",
    ) -> None:
        self.url = os.fspath(path)
        self._folder = os.path.abspath(self.url)
        self._page_cache = check_page_cache(page_cache)
        self._cold = ColdReads(self._page_cache)
        self._expected = 0

    def make(self) -> None:
        """Make the folder and those above it, durably; see ByteStore."""
        missing = []
        folder = self._folder
        while not os.path.isdir(folder):
            # Another rank may make it between two looks.
            if os.path.exists(folder) and not os.path.isdir(folder):
                raise _not_a_folder(folder)
            missing.append(folder)
            folder = os.path.dirname(folder)
        for folder in reversed(missing):
            _make_folder(folder)

    def claim(self, *, shared: bool = False) -> Claim | None:
        """Keep other saves out of the folder; see ByteStore. Across machines if its locks do."""
        return claim_folder(self._folder, shared=shared)

    def create(self, name: str, *, nbytes_hint: int | None = None, durable: bool = True) -> LocalWriter:
        """Start a new file; see ByteStore."""
        path = self._path(check_name(name))
        fd = create_file(path)
        nbytes = BUFFER_NBYTES if nbytes_hint is None else nbytes_hint
        output = None
        if durable and nbytes >= BUFFER_NBYTES:
            output = BufferOutput(fd, self._page_cache, nbytes, max(nbytes, self._expected))
        return LocalWriter(path, fd, durable=durable, output=output)

    def open(self, name: str) -> LocalReader:
        """Open a file for reading; see ByteStore."""
        path = self._path(check_name(name, error=UnsafeMetadataError))
        try:
            fd = os.open(path, _OLD & ~os.O_NOFOLLOW if is_read_through_links(name) else _OLD)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"{path}: there is no such file.", path=path) from error
        except NotADirectoryError as error:
            raise _not_a_folder(self._folder) from error
        except OSError as error:
            # Linux says ELOOP for a link that must not be followed, the BSDs EMLINK; ENXIO is a socket.
            if error.errno in {errno.ELOOP, errno.EMLINK, errno.ENXIO}:
                raise _not_regular(path) from error
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise _not_regular(path)
        os.set_blocking(fd, True)
        return LocalReader(path, fd, cold=self._cold)

    def expect(self, nbytes: int) -> None:
        """Take note of how much will be read or written; see FileSource."""
        self._expected = max(self._expected, nbytes)
        self._cold.expect(nbytes)

    def cache_room(self, names: Iterable[str]) -> CacheRoom | None:
        """The page cache: one for all processes of a machine that see the very same folder."""
        boot = this_process().boot
        try:
            found = os.stat(self._folder)
            if not boot or self._cold.choice == "bypass":
                return None
            is_endless = self._cold.choice == "keep" or self._is_hot(names)
        except (OSError, CheckpointError):
            return None  # the read will say what is wrong
        return CacheRoom(f"{boot} {found.st_dev} {found.st_ino}", sys.maxsize if is_endless else room())

    def _is_hot(self, names: Iterable[str]) -> bool:
        """Whether files seem to be in the page cache: a look at some of them."""
        for name in sorted(names)[:_LOOKED_AT]:
            with self.open(name) as file:
                if not file.is_hot():
                    return False
        return True

    def through_cache(self) -> "LocalStore":
        """The same folder, with cold reads through the page cache."""
        return LocalStore(self._folder, page_cache="keep")

    def replace(self, name: str, *pieces: Buffer, durable: bool = True, overwrite: bool = True) -> None:
        """Put the pieces under ``name`` in one atomic step; see ByteStore."""
        path = self._path(check_name(name))
        views = [byte_view(piece) for piece in pieces]
        temporary = temporary_name(name)
        # All names are relative to one open folder: it may be moved meanwhile, and still gets all of it.
        with naming(path), _open_folder(self._folder) as folder:
            fd = os.open(temporary, NEW_FILE, 0o666, dir_fd=folder)
            try:
                try:
                    write_fully(fd, views, 0)
                    if durable:
                        flush_to_disk(fd)
                finally:
                    os.close(fd)
                if overwrite:
                    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                else:
                    _rename_to_new(temporary, name, folder)
            except BaseException:
                _unlink(temporary, folder=folder)
                raise
            if durable:
                _sync_folder(folder)

    def exists(self, name: str) -> bool:
        """Whether there is a regular file of that name."""
        try:
            found = os.stat(self._path(check_name(name)), follow_symlinks=is_read_through_links(name))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return stat.S_ISREG(found.st_mode)

    def list(self) -> dict[str, int]:
        """The name and size of every regular file."""
        sizes = {entry.name: _size(entry) for entry in self._entries()}
        return {name: size for name, size in sizes.items() if size is not None}

    def names(self) -> set[str]:
        """The name of every regular file, without a look at any of them."""
        return {entry.name for entry in self._entries() if _is_file(entry)}

    def _entries(self) -> "Iterator[os.DirEntry[str]]":
        """What is in the folder; nothing if there is no such folder."""
        try:
            with os.scandir(self._folder) as entries:
                yield from entries
        except FileNotFoundError:
            return
        except NotADirectoryError as error:
            raise _not_a_folder(self._folder) from error

    def below(self, name: str | None = None, *, is_brief: bool = False) -> Below:
        """The files and folders of this folder; see FileSource. Links to folders count as folders."""
        files, folders, unseen = set[str](), dict[str, FileFacts | None](), dict[str, OSError]()
        for entry in islice(self._entries(), _MOST_ENTRIES if is_brief else None):
            if is_brief and len(folders) >= _MOST_FOLDERS:
                break
            if entry.is_dir():
                folders[entry.name] = None
                if name is not None:
                    try:
                        folders[entry.name] = _facts(f"{entry.path}/{name}")
                    except OSError as error:
                        unseen[entry.name] = error
            elif _is_file(entry):
                files.add(entry.name)
        return Below(files, folders, unseen)

    def facts(self, name: str) -> FileFacts | None:
        """What is known of a regular file; see FileSource."""
        return _facts(self._path(check_name(name)))

    def rewrite(self, name: str, data: bytes) -> bool:
        """Put ``data`` into a small file that exists; see ByteStore. A missing file is never made."""
        path = self._path(check_name(name))
        try:
            fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in NO_RANGES:
                raise
            return super().rewrite(name, data)
        with naming(path):
            try:
                write_fully(fd, [memoryview(data)], 0)
                os.ftruncate(fd, len(data))
            finally:
                os.close(fd)
        return True

    def delete(self, names: Iterable[str]) -> None:
        """Remove files, or links in their place; a missing one is fine."""
        paths = [self._path(check_name(name)) for name in names]
        failures = [_unlink(path) for path in paths]
        for failure in filter(None, failures):
            raise failure

    def remove_if_empty(self) -> None:
        """Remove the folder if nothing is in it; see ByteStore."""
        with suppress(OSError):
            os.rmdir(self._folder)

    def sync(self) -> None:
        """Make the names of finished files durable."""
        with naming(self._folder), _open_folder(self._folder) as folder:
            _sync_folder(folder)

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)


def _facts(path: str) -> FileFacts | None:
    try:
        found = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return FileFacts(found.st_size, found.st_mtime_ns, f"{found.st_mtime_ns:x}-{found.st_size:x}")


def _is_file(entry: "os.DirEntry[str]") -> bool:
    return entry.is_file(follow_symlinks=is_read_through_links(entry.name))


def _size(entry: "os.DirEntry[str]") -> int | None:
    with suppress(FileNotFoundError):  # removed since the folder was read
        if _is_file(entry):
            return entry.stat(follow_symlinks=is_read_through_links(entry.name)).st_size
    return None


def _not_a_folder(path: str) -> NotAFolderError:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    folder, name = os.path.split(path)
    if name == METADATA or os.path.exists(os.path.join(folder, METADATA)):
        hint = f"Name the folder that it is in: {folder}"
    else:
        reader = (
            f"HuggingFaceStorageReader({folder!r})"
            if name.endswith(".safetensors")
            else f"TorchSaveReader({path!r}), if torch.save wrote it"
        )
        hint = f"A checkpoint is a folder: name another path. To load the file, pass storage_reader={reader}"
    return NotAFolderError(f"{path} is a file, not the folder of a checkpoint. {hint}", path=path)


def _make_folder(path: str) -> None:
    try:
        os.mkdir(path)
    except FileExistsError:
        # Another rank was faster, and makes it durable before it reports success.
        if not os.path.isdir(path):
            raise
    else:
        with _open_folder(os.path.dirname(path)) as parent:
            _sync_folder(parent)


def _rename_to_new(old: str, new: str, folder: int) -> None:
    """Rename a file unless there is one of that name: of several callers one succeeds."""
    try:
        os.link(old, new, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError as error:
        raise existing_file(new) from error
    except OSError as error:
        if error.errno not in {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}:
            raise
        # A file system without hard links: the lock and the lease of the save must do.
        os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)
    else:
        os.unlink(old, dir_fd=folder)


def _unlink(path: str, *, folder: int | None = None) -> OSError | None:
    """Remove a file. A missing one is fine; any other failure is returned."""
    try:
        os.unlink(path, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None


@contextmanager
def _open_folder(path: str) -> Iterator[int]:
    fd = os.open(path, _FOLDER)
    try:
        yield fd
    finally:
        os.close(fd)


def _sync_folder(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems know no fsync of a folder; there is no other way to ask them.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise


def _not_regular(path: str) -> StorageError:
    return StorageError(
        f"{path}: is a link, or something else that is no regular file, and is not opened. If the folder is "
        "made of links on purpose, copy the files that they point to.",
        path=path,
    )
