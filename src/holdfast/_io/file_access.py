"""Owns the contract of one open file: written from front to back, or read in ranges, whatever keeps it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from typing_extensions import Buffer, Self

from holdfast._format.item_table import Payload
from holdfast._io.blocks import BlockChecker, BlockSums, check_block_table
from holdfast._io.progress import STRIDE, ProgressTracker
from holdfast._io.streams import byte_view
from holdfast.errors import MetadataFormatError, TruncatedFileError, UsageError


class FileWriter(ABC):
    """Writes one new file from front to back; one thread at a time.

    A with-block finishes the file when it ends, and aborts it when an exception leaves it. After any
    exception from ``write`` or ``finish`` the writer has aborted by itself: its file is gone and no
    thread of it is alive. A failed flush is never tried again, because
    the second one would report success for bytes that the kernel has already dropped.

    The caller must not change a buffer while it is being written. It may do so as soon as the call
    returns: what is not written yet has been copied.

    An implementation has ``_append``, ``_complete`` and ``_discard``.

    Attributes:
        path: The file.
        position: How many bytes it has been given.
        progress: Is told of the bytes that were taken, or, if the storage is far away, that it has confirmed.
            An exception that it raises leaves ``write`` or ``finish``.
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
        self._check_open()
        view = byte_view(data)
        try:
            while view:
                # Cut where buffers of files are too, so that none is filled in two steps for it.
                piece = view[: STRIDE - self.position % STRIDE]
                self._append(piece, sums)
                self.position += len(piece)
                self._report(len(piece))
                view = view[len(piece) :]
        except BaseException:
            self.abort()
            raise

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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
        elif self._ended is None:
            self.finish()

    def _check_open(self) -> None:
        if self._ended is not None:
            raise UsageError(f"{self.path}: this file is {self._ended} already.", path=self.path)

    def _report(self, nbytes: int) -> None:
        """Tell ``progress`` of ``nbytes`` that ``_append`` has just taken.

        A writer whose storage confirms bytes later overrides this, and reports what was confirmed so far.
        """
        self.progress.advance(nbytes)

    @abstractmethod
    def _append(self, view: memoryview, sums: BlockSums | None) -> None:
        """Take all of ``view`` before returning, and feed the same bytes to ``sums`` if there is one."""

    @abstractmethod
    def _complete(self) -> None:
        """Write what is left, make it durable if asked to, and free everything."""

    @abstractmethod
    def _discard(self) -> None:
        """Free everything and remove the file. Raises nothing for a file that is gone already."""


class RangeWriter(ABC):
    """Writes ranges of one file that has its size already; any number of threads at the same time.

    Several processes may write different ranges of one file at the same time. A with-block finishes the file
    when it ends, and only closes it when an exception leaves it. The caller must not change a buffer while it
    is being written, and may do so as soon as the call returns.
    """

    path: str

    @abstractmethod
    def write_at(self, offset: int, view: memoryview) -> None:
        """Write all of ``view`` at an offset. Writing beyond the end of the file is not allowed."""

    @abstractmethod
    def finish(self) -> None:
        """Return when what was written here is on stable storage, and close the file."""

    @abstractmethod
    def close(self) -> None:
        """Free everything, also after a failure. Does nothing the second time."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()


def check_payloads(payloads: Sequence[Payload], offset: int, view: memoryview, *, path: str) -> None:
    """Raise ChecksumError unless the payloads in ``view``, which begins at ``offset``, are what was saved."""
    for payload in payloads:
        at = payload.offset - offset
        checker = BlockChecker(payload.crcs, payload.block_size, path=path, offset=payload.offset)
        checker.update(view[at : at + payload.nbytes])
        checker.finish()


class FileReader(ABC):
    """Reads byte ranges of one file; any number of threads at the same time.

    After an exception the destination holds anything: old bytes, new bytes, or wrong ones.

    Attributes:
        path: The file.
        nbytes: Its size.
        progress: Is told of events such as retries, if there is one. The caller counts the bytes.
    """

    path: str
    nbytes: int
    progress: ProgressTracker | None = None

    @abstractmethod
    def read_into(self, offset: int, buffer: Buffer) -> None:
        """Fill ``buffer`` with the bytes from ``offset`` on, completely.

        Raises:
            TruncatedFileError: The file ends before that; nothing was read.
        """

    def read_blocks_into(self, buffer: Buffer, payload: Payload, start: int = 0) -> None:
        """Fill ``buffer`` with the bytes of a payload from ``start`` on, and check every one of them.

        Whole blocks are read straight into ``buffer``. A first or last block that ``buffer`` takes only a
        part of must still be read entirely to be checked: it goes through memory of one block.
        Several threads may read one payload: cut at boundaries of blocks, no block is read twice.

        Args:
            buffer: The writable destination.
            payload: Where in the file the payload is, and its checksums.
            start: The first byte wanted, counted from the payload's start.

        Raises:
            ChecksumError: A block is not the one that was written; names file and offset.
            TruncatedFileError: The file ends before a block that is needed.
            MetadataFormatError: Range, payload and checksums do not fit together.
        """
        view = byte_view(buffer)
        stop = start + len(view)
        check_block_table(payload.crcs, payload.nbytes, payload.block_size, path=self.path)
        if not 0 <= start <= stop <= payload.nbytes:
            raise MetadataFormatError(
                f"{self.path}: bytes {start} to {stop} were asked of a payload that has {payload.nbytes}.",
                path=self.path,
                expected=payload.nbytes,
                found=stop,
            )
        self._read_blocks(view, payload, start)

    def _read_blocks(self, view: memoryview, payload: Payload, start: int) -> None:
        """Do what ``read_blocks_into`` promises, once its arguments are checked."""
        offset, nbytes, crcs, block_size = payload
        at, stop = start, start + len(view)
        while at < stop:
            first = at // block_size
            begin, end = first * block_size, min(first * block_size + block_size, nbytes)
            if begin < at or stop < end:
                block = memoryview(bytearray(end - begin))
                self.read_whole_blocks(offset + begin, block, crcs[first : first + 1], block_size)
                end = min(end, stop)
                view[at - start : end - start] = block[at - begin : end - begin]
            else:
                end = stop if stop == nbytes else stop - stop % block_size
                last = -(-end // block_size)
                part = view[at - start : end - start]
                self.read_whole_blocks(offset + begin, part, crcs[first:last], block_size)
            at = end

    def read_whole_blocks(self, offset: int, view: memoryview, crcs: Sequence[int], block_size: int) -> None:
        """Fill ``view`` with whole blocks from ``offset`` on, and check each.

        A store that can read and check in steps overrides this.
        """
        self.read_into(offset, view)
        check_payloads([Payload(offset, len(view), crcs, block_size)], offset, view, path=self.path)

    def read_together(self, offset: int, view: memoryview, payloads: Sequence[Payload]) -> None:
        """Fill ``view`` with the bytes from ``offset`` on, and check the payloads that lie in it.

        A store with ``request_nbytes`` overrides this, and makes one request.

        Raises:
            ChecksumError: A payload is not the one that was written. ``view`` has what was read.
            TruncatedFileError: The file ends before that.
        """
        if len(payloads) == 1 and payloads[0].nbytes == len(view):
            self.read_whole_blocks(offset, view, payloads[0].crcs, payloads[0].block_size)
        else:
            self.read_into(offset, view)
            check_payloads(payloads, offset, view, path=self.path)

    def close(self) -> None:  # noqa: B027 - a reader may have nothing to free
        """Free everything. Does nothing the second time."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note(self, event: str) -> None:
        """Count something that should not be needed, such as a retry."""
        if self.progress is not None:
            self.progress.note(event)

    def _fill_from(self, fetch: Callable[[int, int], bytes], offset: int, view: memoryview) -> None:
        """Fill ``view`` with what ``fetch`` gives for an offset in the file and a number of bytes.

        It may give fewer bytes, and gives none at the end of the file.

        Raises:
            TruncatedFileError: The file ends before that, since it was changed while it was read.
        """
        done = 0
        while done < len(view):
            data = fetch(offset + done, len(view) - done)
            if not data:
                self.nbytes = offset + done
                self._check_range(offset, len(view))
            view[done : done + len(data)] = data
            done += len(data)

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
