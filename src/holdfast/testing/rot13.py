"""A complete stream transform in few lines: an example for plugin authors, and a transform for tests."""

import io
import os
from typing import IO, cast

from typing_extensions import Buffer

from holdfast.errors import UnknownExtensionError, UsageError
from holdfast.extension import ExtensionRegistry, StreamTransformExtension

__all__ = ["Rot13Example", "get_test_extension_registry"]

_LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ROTATED = b"NOPQRSTUVWXYZABCDEFGHIJKLMnopqrstuvwxyzabcdefghijklm"
_ROT13 = bytes.maketrans(_LETTERS, _ROTATED)


class Rot13Example(StreamTransformExtension):
    """Shifts every ASCII letter by 13 places and leaves all other bytes unchanged. Twice gives the original.

    It hides nothing and detects no damage. What it reads is seekable where its input is.

    Args:
        chunk_size: The most bytes that are transformed at a time.
    """

    def __init__(self, chunk_size: int = io.DEFAULT_BUFFER_SIZE) -> None:
        super().__init__()
        if chunk_size < 1:
            raise UsageError(f"chunk_size must be at least 1, got {chunk_size}", found=chunk_size)
        self._chunk_size = chunk_size

    @staticmethod
    def registry_name() -> str:
        """``stream.rot13``, as in torch."""
        return "stream.rot13"

    @staticmethod
    def from_descriptor(version: str) -> "Rot13Example":
        """Make an instance for version 1; any other major version raises UnknownExtensionError."""
        if version.partition(".")[0] != "1":
            raise UnknownExtensionError(f"stream.rot13: version {version!r} is not known, expected 1")
        return Rot13Example()

    def get_descriptor(self) -> str:
        """``stream.rot13/1``."""
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Rotate what is written, into ``output``."""
        return cast("IO[bytes]", _Writer(output, self._chunk_size))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        """Rotate back what is read from ``input``."""
        return cast("IO[bytes]", _Reader(input, self._chunk_size))


class _Writer(io.RawIOBase):
    def __init__(self, output: IO[bytes], chunk_size: int) -> None:
        self._output = output
        self._chunk_size = chunk_size

    def writable(self) -> bool:
        return True

    def write(self, b: Buffer, /) -> int:
        if self.closed:
            raise ValueError("write to a closed stream")
        # The cast makes len() and slices count bytes, also where the buffer's items are larger.
        with memoryview(b).cast("B") as data:
            for start in range(0, len(data), self._chunk_size):
                # A copy: the caller's memory is not ours to rotate.
                chunk = data[start : start + self._chunk_size].tobytes().translate(_ROT13)
                while chunk:
                    # A raw output may take only a part.
                    written = self._output.write(chunk)
                    if not written:
                        raise BlockingIOError("the output took no bytes; it must be a blocking stream")
                    chunk = chunk[written:]
            return len(data)

    def flush(self) -> None:
        if self.closed:
            raise ValueError("flush of a closed stream")
        if not self._output.closed:
            self._output.flush()

    def close(self) -> None:
        # A transform that ends its stream (last chunk, checksum) would write that before, in a try.
        try:
            super().close()
        finally:
            self._output.close()


class _Reader(io.RawIOBase):
    def __init__(self, input: IO[bytes], chunk_size: int) -> None:
        self._input = input
        self._chunk_size = chunk_size

    def readable(self) -> bool:
        return True

    def readinto(self, b: Buffer, /) -> int | None:
        if self.closed:
            raise ValueError("read of a closed stream")
        with memoryview(b).cast("B") as destination:
            # Every input has read(), not every one has readinto(). Fewer bytes than asked for are fine here.
            data = cast("bytes | None", self._input.read(min(len(destination), self._chunk_size)))
            if data is None:
                return None
            destination[: len(data)] = data.translate(_ROT13)
            return len(data)

    def seekable(self) -> bool:
        return self._input.seekable()

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._input.seek(offset, whence)

    def tell(self) -> int:
        return self._input.tell()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._input.close()


def get_test_extension_registry() -> ExtensionRegistry:
    """A new registry that knows ``Rot13Example`` and the built-in transforms."""
    registry = ExtensionRegistry()
    registry.register(Rot13Example)
    return registry
