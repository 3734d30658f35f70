"""Owns the contract of storage: a checkpoint's folder as named files of bytes, whatever keeps them.

A ``ByteStore`` is one folder (or one prefix of an object store) with plain files in it, no folders
inside. Data files are created once, written from front to back, and never changed again. What makes a
checkpoint exist is a single ``replace``, which is atomic. An author of a new store implements the
abstract methods and runs ``holdfast.testing.store_contract.StoreContract`` over it.

An error of the operating system leaves as an OSError with errno, strerror and the file's path.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from types import TracebackType

from typing_extensions import Buffer, Self

from holdfast._io.blocks import BLOCK_SIZE, BlockChecker, BlockSums, check_block_table
from holdfast._io.progress import STRIDE, ProgressTracker
from holdfast.errors import CheckpointError, MetadataFormatError, TruncatedFileError, UsageError

__all__ = ["ByteStore", "Claim", "FileReader", "FileWriter", "byte_view", "check_name"]


def check_name(name: str, *, error: type[CheckpointError] = UsageError) -> str:
    """Return ``name`` if it is the plain name of a file inside a folder, else raise ``error``.

    Names in a checkpoint's metadata come from strangers: one that leads out of the folder is refused
    here and nowhere else. ``open`` and ``read`` raise UnsafeMetadataError, because the names they get
    stand in metadata; all other methods raise UsageError.
    """
    if name in {"", ".", ".."} or any(c in name for c in "/\\\0"):
        raise error(
            f"{name!r} is not a plain file name. A checkpoint's files lie directly in its folder: a name has "
            "no '/', no '\\', no NUL, and is not '.' or '..'.",
            found=name,
        )
    return name


def byte_view(data: Buffer) -> memoryview:
    """The bytes of any contiguous buffer, without a copy. Raises TypeError for one that is not contiguous."""
    view = memoryview(data)
    # Python refuses to cast a view that has a zero in its shape.
    return view.cast("B") if view.nbytes else memoryview(b"")


class FileWriter(ABC):
    """Writes one new file from front to back; one thread at a time.

    A with-block finishes the file when it ends, and aborts it when an exception leaves it. After any
    exception from ``write``, ``write_blocks``, ``pad_to`` or ``finish`` the writer has aborted by
    itself: its file is gone and no thread of it is alive. A failed flush is never tried again, because
    the second one would report success for bytes that the kernel has already dropped.

    The caller must not change a buffer while it is being written. It may do so as soon as the call
    returns: what is not written yet has been copied.

    An implementation has ``_append``, ``_complete`` and ``_discard``.

    Attributes:
        path: The file.
        position: How many bytes it has been given.
        progress: Told of every few MiB; an exception from it is one from ``write``.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.position = 0
        self.progress = ProgressTracker()
        self._ended: str | None = None

    def write(self, data: Buffer, sums: BlockSums | None = None) -> None:
        """Append the bytes of any contiguous buffer.

        With ``sums``, they are the next bytes of a payload that comes in several writes: its checksums
        are computed in the same pass, of the bytes that are handed to the storage.
        """
        self._take(data, sums)

    def write_blocks(self, data: Buffer, block_size: int = BLOCK_SIZE) -> "array[int]":
        """Append ``data`` as a payload, and return the CRC-32 of each of its blocks.

        They are computed in the same pass, of the bytes that are handed to the storage.
        """
        sums = BlockSums(block_size)
        self._take(data, sums)
        return sums.finish()

    def pad_to(self, alignment: int) -> None:
        """Append zeros up to the next multiple of ``alignment``."""
        if alignment < 1:
            raise UsageError(f"An alignment must be 1 or more bytes, not {alignment}.", found=alignment)
        self.write(bytes(-self.position % alignment))

    def finish(self) -> int:
        """End the file and return its size. When this returns, every byte of a durable file is on stable
        storage; its name is once ``ByteStore.sync`` has returned too.
        """
        self._check_open()
        try:
            self._complete()
        except BaseException:
            self.abort()
            raise
        self._ended = "finished"
        return self.position

    def abort(self) -> None:
        """Close the file and remove it. Does nothing once the file is finished or aborted."""
        if self._ended is None:
            self._ended = "aborted"
            self._discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._ended is None:
            self.finish()

    def _take(self, data: Buffer, sums: BlockSums | None) -> None:
        self._check_open()
        view = byte_view(data)
        try:
            while view:
                # Cut where buffers of files are too, so that none is filled in two steps for it.
                piece = view[: STRIDE - self.position % STRIDE]
                self._append(piece, sums)
                self.position += len(piece)
                self.progress.advance(len(piece))
                view = view[len(piece) :]
        except BaseException:
            self.abort()
            raise

    def _check_open(self) -> None:
        if self._ended is not None:
            raise UsageError(f"{self.path}: this file is {self._ended} already.", path=self.path)

    @abstractmethod
    def _append(self, view: memoryview, sums: BlockSums | None) -> None:
        """Take all of ``view`` before returning, and feed the same bytes to ``sums`` if there is one."""

    @abstractmethod
    def _complete(self) -> None:
        """Write what is left, make it durable if asked to, and free everything."""

    @abstractmethod
    def _discard(self) -> None:
        """Free everything and remove the file. Raises nothing for a file that is gone already."""


class FileReader(ABC):
    """Reads byte ranges of one file; any number of threads at the same time.

    After an exception the destination holds anything: old bytes, new bytes, or wrong ones.
    """

    path: str
    nbytes: int

    @abstractmethod
    def read_into(self, offset: int, buffer: Buffer) -> None:
        """Fill ``buffer`` with the bytes from ``offset`` on, completely.

        Raises:
            TruncatedFileError: The file ends before that; nothing was read.
        """

    def read_blocks_into(
        self,
        buffer: Buffer,
        *,
        payload_offset: int,
        payload_nbytes: int,
        crcs: Sequence[int],
        block_size: int = BLOCK_SIZE,
        start: int = 0,
    ) -> None:
        """Fill ``buffer`` with the bytes of a payload from ``start`` on, and check every one of them.

        Whole blocks are read straight into ``buffer``. A first or last block that ``buffer`` takes only a
        part of must still be read entirely to be checked: it goes through memory of one block.
        To use several threads on one payload, cut it with ``blocks.split_ranges``.

        Args:
            buffer: The writable destination.
            payload_offset: Where in the file the payload begins.
            payload_nbytes: Its size.
            crcs: The CRC-32 of each of its blocks.
            block_size: The size of these blocks.
            start: The first byte wanted, counted from the payload's start.

        Raises:
            ChecksumError: A block is not the one that was written; names file and offset.
            TruncatedFileError: The file ends before a block that is needed.
            MetadataFormatError: Range, payload and checksums do not fit together.
        """
        view = byte_view(buffer)
        stop = start + len(view)
        check_block_table(crcs, payload_nbytes, block_size, path=self.path)
        if not 0 <= start <= stop <= payload_nbytes:
            raise MetadataFormatError(
                f"{self.path}: bytes {start} to {stop} were asked of a payload that has {payload_nbytes}.",
                path=self.path,
                expected=payload_nbytes,
                found=stop,
            )
        at = start
        while at < stop:
            first = at // block_size
            begin, end = first * block_size, min(first * block_size + block_size, payload_nbytes)
            if begin < at or stop < end:
                block = memoryview(bytearray(end - begin))
                self.read_whole_blocks(payload_offset + begin, block, crcs[first : first + 1], block_size)
                end = min(end, stop)
                view[at - start : end - start] = block[at - begin : end - begin]
            else:
                end = stop if stop == payload_nbytes else stop - stop % block_size
                last = -(-end // block_size)
                part = view[at - start : end - start]
                self.read_whole_blocks(payload_offset + begin, part, crcs[first:last], block_size)
            at = end

    def read_whole_blocks(self, offset: int, view: memoryview, crcs: Sequence[int], block_size: int) -> None:
        """Fill ``view`` with whole blocks from ``offset`` on, and check each.

        A store that can read and check in steps overrides this.
        """
        self.read_into(offset, view)
        checker = BlockChecker(crcs, block_size, path=self.path, offset=offset)
        checker.update(view)
        checker.finish()

    @abstractmethod
    def close(self) -> None:
        """Free everything. Does nothing the second time."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_range(self, offset: int, nbytes: int) -> None:
        """Raise TruncatedFileError unless the file has ``nbytes`` bytes from ``offset`` on."""
        if offset < 0:
            raise MetadataFormatError(f"{self.path}: no byte has the offset {offset}.", path=self.path)
        if offset + nbytes > self.nbytes:
            raise TruncatedFileError(
                f"{self.path}: bytes {offset} to {offset + nbytes} are needed, but the file has "
                f"{self.nbytes} bytes. It was cut short after it was saved; take another copy of it, or "
                "another checkpoint.",
                path=self.path,
                expected=offset + nbytes,
                found=self.nbytes,
            )


class Claim:
    """A folder that is one save's alone, if its store can keep others out; this one keeps nobody out."""

    def release(self) -> None:
        """Let others in. Does nothing the second time."""


class ByteStore(ABC):
    """One checkpoint's folder. Its methods may be called from any thread.

    Attributes:
        url: How the user would name it.
    """

    url: str

    @abstractmethod
    def make(self) -> None:
        """Make the folder, and those above it, durably. Does nothing where it exists."""

    def claim(self, *, shared: bool = False) -> Claim:  # noqa: ARG002 - for stores that can
        """Keep other saves out of the folder until the claim is released, dropped, or the process ends.

        A store that cannot do that lets everybody in.

        Args:
            shared: Let in others that claim it so, too.

        Raises:
            StorageError: Another save has claimed it.
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
            StorageError: There is something of that name, be it a dangling link; it stays as it was.
        """

    @abstractmethod
    def open(self, name: str) -> FileReader:
        """Open a file for reading.

        Raises:
            CheckpointNotFoundError: There is no such file.
            StorageError: It is not a regular file.
        """

    def read(self, name: str, *, max_bytes: int) -> bytearray:
        """The whole of a small file, in memory that is the caller's.

        Raises:
            MetadataFormatError: It is larger than ``max_bytes``; no memory was taken.
            CheckpointNotFoundError: There is no such file.
        """
        with self.open(name) as file:
            if file.nbytes > max_bytes:
                raise MetadataFormatError(
                    f"{file.path}: has {file.nbytes} bytes, and at most {max_bytes} are read. Either it is "
                    "not what its name says, or the limit must be raised.",
                    path=file.path,
                    expected=max_bytes,
                    found=file.nbytes,
                )
            data = bytearray(file.nbytes)
            file.read_into(0, data)
        return data

    @abstractmethod
    def replace(self, name: str, *pieces: Buffer, durable: bool = True) -> None:
        """Put the pieces, one after the other, under ``name`` in one atomic step: the commit.

        A reader, and a crash at any instant, finds the old file or the new one, whole. When this
        returns, a durable one is on stable storage under its name. When it raises, the old file is
        there bit for bit, and nothing else is left behind; only if making the new name durable is
        what failed, the new file may be there already.
        """

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether ``open`` would find such a file."""

    @abstractmethod
    def list(self) -> dict[str, int]:
        """The name and size of every file, in no order. Empty where there is no folder."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Remove files; a missing one is fine. All are tried before the first failure is raised."""

    @abstractmethod
    def sync(self) -> None:
        """Make the names of finished files durable. Called before the commit that refers to them."""
