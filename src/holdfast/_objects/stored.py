"""Objects on their way to or from a file: raw bytes and the container around them, not put together."""

import io
from typing import Any

from holdfast._format.torch_item import ItemFrame
from holdfast._io.blocks import crc32

__all__ = ["LoadedObject", "StoredObject"]


class _Unassembled(io.BytesIO):
    """A stream whose content is put together when somebody first reads it.

    A storage or planner that knows the subclasses takes the parts and copies nothing, which is why a value
    of 1 GiB of bytes needs no second GiB. Anyone else sees an ordinary stream.
    """

    _is_filled = False

    def parts(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def _fill(self) -> None:
        if not self._is_filled:
            self._is_filled = True
            for part in self.parts():
                super().write(part)
            super().seek(0)

    def read(self, size: int | None = -1, /) -> bytes:
        self._fill()
        return super().read(size)

    def read1(self, size: int | None = -1, /) -> bytes:
        self._fill()
        return super().read1(size)

    def readinto(self, buffer: Any, /) -> int:
        self._fill()
        return super().readinto(buffer)

    def readline(self, size: int | None = -1, /) -> bytes:
        self._fill()
        return super().readline(size)

    def readinto1(self, buffer: Any, /) -> int:
        self._fill()
        return super().readinto1(buffer)

    def readlines(self, size: int | None = -1, /) -> list[bytes]:
        self._fill()
        return super().readlines(size)

    def __next__(self) -> bytes:
        self._fill()
        return super().__next__()

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._fill()
        return super().seek(offset, whence)

    def getvalue(self) -> bytes:
        self._fill()
        return super().getvalue()

    def getbuffer(self) -> memoryview:
        self._fill()
        return super().getbuffer()


class StoredObject(_Unassembled):
    """An object to be saved: ``payload`` goes into the container ``item``."""

    def __init__(self, item: ItemFrame, payload: memoryview) -> None:
        super().__init__()
        self.item = item
        self.payload = payload

    def parts(self) -> tuple[Any, ...]:
        return self.item.head(0), self.payload, self.item.tail(0, crc32(self.payload))


class LoadedObject(_Unassembled):
    """An object that was read: ``payload``, and the bytes of the container before and after it."""

    def __init__(self, head: bytes, payload: bytes | bytearray, tail: bytes) -> None:
        super().__init__()
        self.head = head
        self.payload = payload
        self.tail = tail

    def parts(self) -> tuple[Any, ...]:
        return self.head, self.payload, self.tail
