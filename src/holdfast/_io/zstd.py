"""Byte streams that compress what is written and inflate what is read, in bounded memory."""

import io
from typing import IO

from typing_extensions import Buffer

from holdfast._io.streams import byte_view, write_all
from holdfast._io.zstd_backends import Backend
from holdfast._io.zstd_inflate import Inflater
from holdfast.errors import StorageError

WRITE_STEP = 1 << 20
"""Bytes given to the compressor at a time, so that one huge write does not have one huge result."""


class _ZstdStream(io.RawIOBase):
    _failure: BaseException | None = None

    def __del__(self) -> None:
        # io's own finalizer calls close(): that would end the frame of a write that was given up, or close an
        # input that its owner may go on using.
        pass

    def _check_usable(self, done: str) -> None:
        """Refuse further use once the stream failed, with the error itself unless that was an interrupt."""
        if self.closed:
            raise ValueError(f"a closed zstd stream cannot be {done}")
        if isinstance(self._failure, Exception):
            raise self._failure
        if self._failure is not None:
            raise StorageError(
                f"{type(self._failure).__name__} interrupted this stream, it cannot be {done} any further; "
                "open a new one"
            ) from self._failure


class ZstdWriter(_ZstdStream):
    """Compresses what is written into one frame with a checksum, on ``output``.

    ``close()`` ends the frame and closes ``output``. Nothing else ends it: a writer that is dropped, or
    left by an exception in a ``with`` block, leaves a frame that every reader knows to be truncated.
    After a failed write the frame has a hole, so later writes and ``close()`` raise the same error.
    """

    def __init__(self, output: IO[bytes], backend: Backend, level: int) -> None:
        self._output = output
        self._compressor = backend.new_compressor(level)
        self._finished = False

    def writable(self) -> bool:
        """Always true."""
        return True

    def write(self, b: Buffer, /) -> int:
        """Take all of ``b`` in and return its length in bytes; ``b`` is neither changed nor kept."""
        self._check_usable("written")
        with byte_view(b) as view:
            total = len(view)
            try:
                for start in range(0, total, WRITE_STEP):
                    with view[start : start + WRITE_STEP] as piece:
                        self._put(self._compressor.compress(piece))
            except BaseException as error:
                self._failure = error
                raise
        return total

    def flush(self) -> None:
        """End the current block, so that all that was written can be read, and flush the output.

        A flush right after another adds nothing; any other costs a block header and some compression.
        """
        if self._finished:
            return
        self._check_usable("written")
        try:
            self._put(self._compressor.flush_block())
            self._output.flush()
        except BaseException as error:
            self._failure = error
            raise

    def close(self) -> None:
        """End the frame and close the output, the latter also when the former fails. Repeating is fine."""
        if self.closed:
            return
        try:
            self._check_usable("written")
            self._put(self._compressor.finish())
        finally:
            self._close_output()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif not self.closed:
            # Ending the frame would make a payload that is not whole look whole.
            self._close_output()

    def _put(self, data: bytes) -> None:
        if data:
            write_all(self._output, data)

    def _close_output(self) -> None:
        self._finished = True
        try:
            self._output.close()
        finally:
            super().close()


class ZstdReader(_ZstdStream):
    """Inflates every frame of ``input``, one after the other; skippable frames are passed over.

    The last bytes of a frame are handed out only after its checksum and length were found right. A read
    fills what it is given unless the data ends (or a non-blocking ``input`` has no more for now). After
    an error the stream stays failed: no byte behind a damaged one is ever returned.

    Raises:
        TruncatedFileError: The input ends before the frame does, or holds no data frame at all.
        IntegrityError: The input is not zstd, is damaged, needs a window over 128 MiB or a dictionary, or
            yields more than ``max_size`` bytes.
    """

    def __init__(self, input: IO[bytes], backend: Backend, *, max_size: int | None = None) -> None:
        self._input = input
        self._pieces = Inflater(input, backend, max_size).pieces()
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """Always true."""
        return True

    def readinto(self, b: Buffer, /) -> int | None:
        """Fill ``b``; return how many bytes it got, 0 at the end, None where the input has none for now."""
        self._check_usable("read")
        with byte_view(b) as view:
            if view.readonly and len(view):
                raise TypeError("readinto needs a writable buffer")
            filled = 0
            while filled < len(view):
                piece = self._take(len(view) - filled)
                if piece is None:
                    return filled or None
                if not piece:
                    break
                view[filled : filled + len(piece)] = piece
                filled += len(piece)
        return filled

    def read(self, size: int | None = -1, /) -> bytes | None:
        """Return the next ``size`` bytes, fewer only at the end; memory follows the data, not ``size``."""
        self._check_usable("read")
        wanted = None if size is None or size < 0 else size
        pieces: list[memoryview] = []
        while wanted is None or wanted > 0:
            piece = self._take(wanted)
            if piece is None and not pieces:
                return None
            if not piece:
                break
            pieces.append(piece)
            if wanted is not None:
                wanted -= len(piece)
        return b"".join(pieces)

    def readall(self) -> bytes | None:  # type: ignore[override]  # io allows None, typeshed does not
        """Return everything up to the end."""
        return self.read(-1)

    def close(self) -> None:
        """Close the input too. Repeating is fine."""
        if self.closed:
            return
        self._ready, self._pieces = memoryview(b""), iter(())
        try:
            self._input.close()
        finally:
            super().close()

    def _take(self, limit: int | None) -> memoryview | None:
        """The next bytes, at most ``limit``; none at the end, None where the input would block."""
        if not self._ready:
            try:
                inflated = next(self._pieces, b"")
            except BaseException as error:
                self._failure = error
                raise
            if inflated is None:
                return None
            self._ready = memoryview(inflated)
        piece = self._ready[:limit]
        self._ready = self._ready[len(piece) :]
        return piece
