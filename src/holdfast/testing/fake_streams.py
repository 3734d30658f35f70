"""Streams that do only what ``io`` requires: a transform must cope with short reads and writes."""

import errno
import io

from typing_extensions import Buffer

__all__ = ["FakeInput", "FakeOutput", "MinimalInput"]

_PATIENCE = 1000
"""How many reads past the end are allowed: more are taken for an endless loop."""


class FakeOutput(io.RawIOBase):
    """Collects what is written to it. It can take few bytes at a time, or fail.

    Args:
        most: The most bytes that one ``write`` takes. None: all.
        room: Bytes after which every write raises ``error``, as on a full disk. None: never.
        keep: Whether the bytes are kept; without, only ``nbytes`` grows.
    """

    def __init__(self, *, most: int | None = None, room: int | None = None, keep: bool = True) -> None:
        self.most = most
        self.room = room
        self.keep = keep
        self.error = OSError(errno.ENOSPC, "no space left on this imaginary disk")
        self.content = bytearray()
        self.nbytes = 0
        self.flush_count = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, b: Buffer, /) -> int:
        """Take at most ``most`` bytes of ``b``."""
        if self.closed:
            raise ValueError("write to a closed sink")
        with memoryview(b).cast("B") as data:
            count = len(data) if self.most is None else min(self.most, len(data))
            if self.room is not None and self.nbytes + count > self.room:
                raise self.error
            self.nbytes += count
            if self.keep:
                self.content += data[:count]
        return count

    def flush(self) -> None:
        """Count the calls."""
        self.flush_count += 1


class FakeInput(io.RawIOBase):
    """Yields ``content``, at most ``most`` bytes a read; not seekable.

    Args:
        content: What is there to be read.
        most: The most bytes that one read returns. None: as many as are asked for.
        blocks: Whether every second read returns None, as a non-blocking stream does that has to wait.
    """

    def __init__(self, content: bytes, *, most: int | None = None, blocks: bool = False) -> None:
        self.content = content
        self.position = 0
        self.most = most
        self.blocks = blocks
        self.read_count = 0
        self._reads_past_the_end = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, b: Buffer, /) -> int | None:
        """Give at most ``most`` bytes, or None where it blocks."""
        if self.closed:
            raise ValueError("read of a closed source")
        self.read_count += 1
        if self.blocks and self.read_count % 2:
            return None
        with memoryview(b).cast("B") as destination:
            count = len(destination) if self.most is None else min(self.most, len(destination))
            piece = self.content[self.position : self.position + count]
            destination[: len(piece)] = piece
        if not piece:
            self._reads_past_the_end += 1
            assert self._reads_past_the_end < _PATIENCE, "the transform reads on and on after the input's end"
        self.position += len(piece)
        return len(piece)


class MinimalInput:
    """A readable stream with as few methods as possible: no ``readinto``, no base class of ``io``."""

    def __init__(self, content: bytes) -> None:
        self._stream = io.BytesIO(content)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._stream.closed

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Always false."""
        return False

    def read(self, size: int = -1) -> bytes:
        """The next bytes, at most ``size``."""
        return self._stream.read(size)

    def close(self) -> None:
        """Close it."""
        self._stream.close()
