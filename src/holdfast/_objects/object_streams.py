"""Objects on their way to or from a file: raw bytes and the container around them, not put together."""

import functools
import io
from typing import Any

from holdfast._format.torch_item import ItemFrame
from holdfast._io.blocks import crc32


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
