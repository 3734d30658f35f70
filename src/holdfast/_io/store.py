"""Owns the contract of storage: a checkpoint's place as named files of bytes, whatever keeps them.

A store is one folder (or one prefix of an object store) with plain files in it, no folders inside. Data
files are created once, written from front to back, and never changed again. A single ``replace``, which is
atomic, makes a checkpoint exist. ``FileSource`` is the half that loads and the command line need;
``ByteStore`` adds the half that saves need. An author of a new store implements the abstract methods, runs
``holdfast.testing.store_contract.StoreContract`` over it, and enters it in ``holdfast._io.places``.

An error of the operating system leaves as an OSError with errno, strerror and the file's path.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from typing_extensions import Buffer

from holdfast._format.names import is_plain_name
from holdfast._io.file_access import FileReader, FileWriter, RangeWriter
from holdfast.errors import (
    AccessDeniedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    MetadataFormatError,
    StorageError,
    UsageError,
)


def check_name(name: str, *, error: type[CheckpointError] = UsageError) -> str:
    """Return ``name`` if it is the plain name of a file inside a folder, else raise ``error``.

    Names in a checkpoint's metadata come from strangers: one that leads out of the folder is refused
    here and nowhere else. ``open`` and ``read`` raise UnsafeMetadataError, because the names they get
    stand in metadata; all other methods raise UsageError.
    """
    if not is_plain_name(name):
        raise error(
            f"{name!r} is not a plain file name. A checkpoint's files lie directly in its folder: a name has "
            "no '/', no '\\', no NUL, and is not '.' or '..'.",
            found=name,
        )
    return name


def taken_name(path: str) -> StorageError:
    """The error of ``create`` for a file that is there."""
    return StorageError(
        f"{path}: exists already, and files of a checkpoint are never overwritten. Remove it, or save to "
        "another folder.",
        path=path,
    )


def check_nbytes(path: str, nbytes: int, max_bytes: int) -> None:
    """Raise MetadataFormatError if a file that is read whole has more bytes than that may have."""
    if nbytes > max_bytes:
        raise MetadataFormatError(
            f"{path}: has {nbytes} bytes, and at most {max_bytes} are read. Either it is not what its name "
            "says, or the limit must be raised.",
            path=path,
            expected=max_bytes,
            found=nbytes,
        )


def existing_file(path: str) -> CheckpointExistsError:
    """The error of ``replace`` for a file that is there and must not be replaced."""
    return CheckpointExistsError(
        f"Checkpoint already exists: another save has written {path}, and overwrite=False was given",
        path=path,
    )


@dataclass(frozen=True)
class StoreTraits:
    """What is fast on a store, and what it can do. The defaults are those of a local disk.

    Attributes:
        writer_nbytes: The memory that one file takes while it is being written.
        requests_in_flight: How many reads at once the store answers fastest.
        read_gap_nbytes: The largest gap between two wanted ranges that is worth reading along with them.
        read_nbytes: The most bytes that small neighbours are read in at once.
        request_nbytes: How many bytes one request should ask for, where a request costs much more than a read
            from a disk. Large neighbours are read together up to so many. 0: each is read by itself.
        lists_sizes: Whether ``list`` costs no more than ``names``. If not, a size is asked for by ``open``.
        random_writes: Whether there are ``takes_ranges``, ``reserve``, ``open_ranges``, ``rename``, ``link``.
        looks_below: Whether ``below`` with a name costs about as much as without.
        may_write_late: Whether files of a process may appear after the process was killed, because it has
            sent them to a server.
        creates_at_once: Whether there is ``create_over``: a file appears, whole, when it is finished.
    """

    writer_nbytes: int = 32 << 20
    requests_in_flight: int = 4
    read_gap_nbytes: int = 64 << 10
    read_nbytes: int = 4 << 20
    request_nbytes: int = 0
    lists_sizes: bool = True
    random_writes: bool = False
    may_write_late: bool = False
    creates_at_once: bool = False
    looks_below: bool = True


class CacheRoom(NamedTuple):
    """The memory in which what one process reads of a place is found by others.

    Attributes:
        identity: Equal for all processes that find there what one of them has read.
        nbytes: How much of the place it has room for.
    """

    identity: str
    nbytes: int


class FileFacts(NamedTuple):
    """What a listing tells of a file.

    Attributes:
        nbytes: Its size.
        modified_ns: When it got its present content, by the store's own clock; None if that is not told.
        version: A text that is another one after the file was replaced, as far as the store can tell.
    """

    nbytes: int
    modified_ns: int | None
    version: str


class Below(NamedTuple):
    """What is directly below a place.

    Attributes:
        files: The names of its files.
        folders: The names of its folders, each with the facts of one file in it; None if it has no such file.
        unseen: Folders whose file could not be looked at, each with the reason. Their facts are None, too.
    """

    files: set[str]
    folders: dict[str, FileFacts | None]
    unseen: Mapping[str, OSError] = MappingProxyType({})


class Claim:
    """The lock of a place. This one keeps nobody out: for stores that have no locks."""

    def release(self) -> None:
        """Let others in. Does nothing the second time."""


class FileSource(ABC):
    """The files of one checkpoint's place, for reading. Its methods may be called from any thread.

    Attributes:
        url: How the user would name the place.
        traits: What is fast on this store, and what it can do.
        reads_whole_rows: Whether the bytes that are read go to other ranks, too, which need other columns of
            the same rows.
    """

    url: str
    reads_whole_rows: bool = False
    traits: StoreTraits = StoreTraits()

    @property
    def can_list(self) -> bool:
        """Whether ``names`` tells all files. If not, saves into the store do not know of each other."""
        return True

    @abstractmethod
    def list(self) -> dict[str, int]:
        """The name and size of every file, in no order. Empty where there is no such place."""

    def names(self) -> set[str]:
        """The name of every file; cheaper than ``list`` on some stores."""
        return set(self.list())

    def known_names(self, *wanted: str) -> set[str]:
        """The name of every file; where they cannot be listed, those of ``wanted`` that are there."""
        return (self.names() if self.can_list else set()) or set(filter(self.exists, wanted))

    def sizes(self, wanted: Iterable[str]) -> dict[str, int]:
        """As ``known_names``, with the sizes."""
        found = self.list() if self.can_list else {}
        for name in () if found else wanted:
            with contextlib.suppress(CheckpointNotFoundError), self.open(name) as file:
                found[name] = file.nbytes
        return found

    def folders_with(self, names: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
        """Folders directly below this place, for messages: those with a file of these names, and the others.

        The first ones are sorted by the time of that file, the newest first. Only a bounded number of folders
        is looked at. If the store knows of no folders, or may not list them, there are none.
        """
        times: dict[str, int] = {}
        with contextlib.suppress(UsageError, AccessDeniedError):
            for name in names:
                for folder, facts in self.below(name, is_brief=True).folders.items():
                    time = -1 if facts is None else facts.modified_ns or 0
                    times[folder] = max(time, times.get(folder, -1))
        found = [folder for folder, time in times.items() if time >= 0]
        return sorted(found, key=times.__getitem__, reverse=True), sorted(times.keys() - set(found))

    def below(self, name: str | None = None, *, is_brief: bool = False) -> Below:  # noqa: ARG002 - for others
        """The files and folders directly below this place, by as few requests as the store needs.

        Args:
            name: The file whose facts are wanted of every folder. None: the names of folders are enough.
            is_brief: Whether a look at a bounded number of them is enough.

        Raises:
            UsageError: The store knows of no folders, as this one.
        """
        raise UsageError(f"{self.url}: folders cannot be listed on this kind of storage", path=self.url)

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether ``open`` would find such a file."""

    def facts(self, name: str) -> FileFacts | None:  # noqa: ARG002 - for stores that know
        """What ``below`` of the place above tells of a file of this place.

        None if there is no such file, or if the store does not tell.
        """
        return None

    def modified_ns(self, name: str) -> int | None:
        """When a file got its present content; see ``facts``, and ``FileFacts.modified_ns``."""
        found = self.facts(name)
        return None if found is None else found.modified_ns

    @abstractmethod
    def open(self, name: str) -> FileReader:
        """Open a file for reading.

        Raises:
            CheckpointNotFoundError: There is no such file.
            StorageError: It is not a regular file.
        """

    def expect(self, nbytes: int) -> None:  # noqa: B027 - for stores that can use it
        """Take note that a load or save is about to read or write so many bytes.

        What stays in the memory of this machine may depend on it.
        """

    def cache_room(self, names: Iterable[str]) -> CacheRoom | None:  # noqa: ARG002 - for stores that have one
        """Where processes of one machine find what one of them has read; None if they do not.

        Args:
            names: The files that will be read. What is in memory already needs no room.
        """
        return None

    def through_cache(self) -> "FileSource":
        """The same place, read so that all that is read can be found there: only for one with a room."""
        return self

    def read(self, name: str, *, max_bytes: int) -> bytearray:
        """The whole of a small file, in memory that is the caller's.

        Raises:
            MetadataFormatError: It is larger than ``max_bytes``; no memory was taken.
            CheckpointNotFoundError: There is no such file.
        """
        with self.open(name) as file:
            check_nbytes(file.path, file.nbytes, max_bytes)
            data = bytearray(file.nbytes)
            file.read_into(0, data)
        return data


class ByteStore(FileSource):
    """One checkpoint's place, for reading and writing. Its methods may be called from any thread."""

    @abstractmethod
    def make(self) -> None:
        """Make the place, and those above it, durably. Does nothing where it exists."""

    def claim(self, *, shared: bool = False) -> Claim | None:  # noqa: ARG002 - for stores that can
        """Keep other saves out of the place until the claim is released, dropped, or the process ends.

        A store that cannot do that lets everybody in. So a claim alone is not enough for a save:
        ``holdfast._io.lease`` has the rest.

        Args:
            shared: Let in others that claim it so, too.

        Returns:
            The claim; None if another save has the place.
        """
        return Claim()

    @abstractmethod
    def create(self, name: str, *, nbytes_hint: int | None = None, durable: bool = True) -> FileWriter:
        """Start a new file. Others may see it, incomplete, until it is finished or aborted.

        Args:
            name: Its plain name.
            nbytes_hint: About how large it will be, if that is known. Only speed depends on it.
            durable: Whether ``finish`` waits for stable storage.

        Raises:
            StorageError: A file, folder or link of that name exists. It is not touched.
        """

    def create_over(self, name: str, *, nbytes_hint: int | None = None) -> FileWriter:
        """Start a file that takes the place of one of that name in the moment when it is finished.

        Until then, and if it is aborted, the other file stays. Only with ``creates_at_once``.
        """
        raise NotImplementedError

    @abstractmethod
    def replace(self, name: str, *pieces: Buffer, durable: bool = True, overwrite: bool = True) -> None:
        """Put the pieces, one after the other, under ``name`` in one atomic step: the commit.

        A reader, and a crash at any instant, finds the old file or the new one, whole. When this
        returns, a durable one is on stable storage under its name. When it raises, the old file is
        there bit for bit, and nothing else is left behind; only if making the new name durable is
        what failed, the new file may be there already.

        Args:
            name: The file.
            pieces: Its content.
            durable: Whether to wait for stable storage.
            overwrite: Whether a file of that name may be replaced. If not, and the store can tell, only one
                of several writers succeeds.

        Raises:
            CheckpointExistsError: There is such a file, and it must not be replaced.
        """

    def rewrite(self, name: str, data: bytes) -> bool:
        """Put ``data`` into a small file that exists, and give it a new modification time. Not durable.

        Returns:
            False if there is no such file. Then none is made, unless it is removed during this very call.
        """
        if not self.exists(name):
            return False
        self.replace(name, data, durable=False)
        return True

    def takes_ranges(self, name: str) -> bool:
        """Whether files here can be written in any order, which a mount of an object store may refuse.

        It is tried with a new file of that name, which is removed. Only with ``random_writes``.
        """
        raise NotImplementedError

    def reserve(self, name: str, nbytes: int) -> None:
        """Make a new file of a size, full of zeros, to be written in ranges. Only with ``random_writes``.

        Raises:
            StorageError: A file, folder or link of that name exists. It is not touched.
        """
        raise NotImplementedError

    def open_ranges(self, name: str) -> RangeWriter:
        """Open a file that exists to write ranges of it, in any process. Only with ``random_writes``.

        Raises:
            CheckpointNotFoundError: There is no such file.
        """
        raise NotImplementedError

    def rename(self, old: str, new: str) -> None:
        """Give a file another name in one atomic step; a file that has that name is replaced.

        Durable once ``sync`` has returned. Only with ``random_writes``.
        """
        raise NotImplementedError

    def link(self, old: str, new: str) -> bool:
        """Give a file a second name, which no file has. Only with ``random_writes``.

        Returns:
            False if this place cannot do that.
        """
        raise NotImplementedError

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Remove files; a missing one is fine. All are tried before the first failure is raised."""

    def remove_if_empty(self) -> None:
        """Remove the place itself if nothing is in it. Anything else that is in the way is ignored."""

    def abort_unfinished(self, is_dead: Callable[[str], bool]) -> None:
        """Give up files that other processes have begun, did not finish, and never will.

        Only for a store where such files are in no listing: elsewhere ``delete`` removes them.

        Args:
            is_dead: Whether nobody will finish the file of a name.

        Raises:
            Exception: They cannot be given up, or not be found. They only cost money.
        """

    @abstractmethod
    def sync(self) -> None:
        """Make the names of finished files durable. Called before the commit that refers to them."""
