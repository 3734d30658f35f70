"""Objects on their way to or from a file: raw bytes and the container around them, not put together."""

import functools
import io
from collections.abc import Callable, Iterable
from typing import Any

from holdfast._format.torch_item import ItemFrame
from holdfast._io.blocks import crc32


class _Unassembled(io.BytesIO):
    """A stream whose content is put together when it is first read.

    A storage or planner that knows the subclasses takes the parts and copies nothing, which is why a value
    of 1 GiB of bytes needs no second GiB. Anyone else sees an ordinary stream.
    """

    _is_filled = False

    def parts(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def __reduce__(self) -> Any:
        """Another process gets an ordinary stream: the parts may be memory of this one."""
        return io.BytesIO, (), (self.getvalue(), self.tell(), None)

    def _fill(self) -> None:
        if not self._is_filled:
            self._is_filled = True
            for part in self.parts():
                self.write(part)
            super().seek(0)


def _after_filling(name: str) -> Any:
    method = getattr(io.BytesIO, name)

    def filled(self: _Unassembled, *args: Any) -> Any:
        self._fill()
        return method(self, *args)

    return functools.wraps(method)(filled)


for _name in (
    *("read", "read1", "readinto", "readinto1", "readline", "readlines", "__next__"),
    *("seek", "getvalue", "getbuffer"),
):
    setattr(_Unassembled, _name, _after_filling(_name))


class StoredObject(_Unassembled):
    """An object to be saved: ``payload`` goes into the container ``item``."""

    def __init__(self, item: ItemFrame, payload: memoryview) -> None:
        super().__init__()
        self.item = item
        self.payload = payload

    @property
    def payload_nbytes(self) -> int:
        """How many bytes the payload has."""
        return self.payload.nbytes

    def pieces(self) -> Iterable[memoryview]:
        """The payload, one piece after the other. A piece stays as it is."""
        return (self.payload,)

    def parts(self) -> tuple[Any, ...]:
        checksum = 0
        pieces = list(self.pieces())
        for piece in pieces:
            checksum = crc32(piece, checksum)
        return self.item.head(0), *pieces, self.item.tail(0, checksum)


class StreamedPayload(StoredObject):
    """An item whose payload is made while it is written, piece by piece: more than fits into memory.

    Args:
        item: The container.
        pieces: Makes the payload, from its beginning.
    """

    def __init__(self, item: ItemFrame, pieces: Callable[[], Iterable[memoryview]]) -> None:
        super().__init__(item, memoryview(b""))
        self._make = pieces

    @property
    def payload_nbytes(self) -> int:
        return self.item.payload_nbytes

    def pieces(self) -> Iterable[memoryview]:
        return self._make()


class LoadedObject(_Unassembled):
    """An object that was read: ``payload``, and the bytes of the container before and after it."""

    def __init__(self, head: bytes, payload: bytes | bytearray, tail: bytes) -> None:
        super().__init__()
        self.head = head
        self.payload = payload
        self.tail = tail

    def parts(self) -> tuple[Any, ...]:
        return self.head, self.payload, self.tail
