"""The bytes of one stored item, checked as they are read."""

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from holdfast._format.manifest import ints
from holdfast._io.blocks import crc32
from holdfast._io.pool import Budget, Cancellation
from holdfast._storage.delivery import Counter
from holdfast._storage.open_files import SharedFile
from holdfast._storage.record import StorageInfo
from holdfast.errors import CheckpointError, ChecksumError
from holdfast.extension import ExtensionRegistry

__all__ = ["Chunk", "ReadContext", "Source", "filled", "naming"]


@dataclass(frozen=True)
class ReadContext:
    """What all jobs of one load share.

    Attributes:
        counter: Where what was read is handed over.
        registry: Makes transforms from their descriptors.
        budget: Bounds the scratch memory of all jobs together.
        cancellation: Says that another job failed.
        verify: Whether checksums are compared.
    """

    counter: Counter
    registry: ExtensionRegistry
    budget: Budget
    cancellation: Cancellation
    verify: bool = True


class Chunk(NamedTuple):
    """A stored chunk: where it lies and what it is."""

    place: StorageInfo
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Source:
    """One item of a file."""

    def __init__(self, context: ReadContext, file: SharedFile, place: StorageInfo) -> None:
        self.context = context
        self.file = file
        self.place = place

    def read(self, start: int, view: memoryview) -> None:
        """Fill ``view`` with the payload's bytes from ``start`` on, and check them if that can be done."""
        place, context = self.place, self.context
        if not place.is_checked or not context.verify:
            self.file.reader().read_into(place.offset + place.payload_offset + start, view)
            return
        self.file.reader().read_blocks_into(
            view,
            payload_offset=place.offset + place.payload_offset,
            payload_nbytes=place.payload_nbytes,
            crcs=ints(place.checksums, "I"),
            block_size=place.block_size,
            start=start,
        )

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the item, container and all, unchecked; fewer than asked for at its end."""
        data = bytearray(max(0, min(nbytes, self.place.length - offset)))
        self.file.reader().read_into(self.place.offset + offset, data)
        return bytes(data)

    def read_wrap(self) -> tuple[bytes, bytes]:
        """What stands before and after the payload, checked."""
        before, after = self.place.payload_offset, self.place.payload_offset + self.place.payload_nbytes
        head, tail = self.read_at(0, before), self.read_at(after, self.place.length - after)
        if self.context.verify and crc32(tail, crc32(head)) != self.place.wrap_checksum:
            raise ChecksumError(
                f"{self.file.path}: the container at {self.place.offset} is not the one that was written",
                path=self.file.path,
            )
        return head, tail

    def stream(self) -> io.BufferedReader:
        """The payload from front to back."""
        return io.BufferedReader(_Stream(self), self.place.block_size)


class _Stream(io.RawIOBase):
    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source
        self.at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        self.source.context.cancellation.check()
        left = self.source.place.length - self.at
        # A block that is read in two portions is read twice to be checked: never more than one at once.
        view = memoryview(buffer).cast("B")[: min(left, self.source.place.block_size)]
        if view:
            self.source.read(self.at, view)
            self.at += len(view)
        return len(view)


@contextlib.contextmanager
def naming(key: str) -> Iterator[None]:
    """Put the key into an error that knows only the file."""
    try:
        yield
    except CheckpointError as error:
        if error.key is not None:
            raise
        raise type(error)(
            f"{key}: {error}", key=key, path=error.path, expected=error.expected, found=error.found
        ) from error


def filled(nbytes: int, fill: Callable[[memoryview], None]) -> bytes:
    """A ``bytes`` object filled in place: its memory is taken once."""
    stream = io.BytesIO()
    if nbytes:
        stream.seek(nbytes - 1)
        stream.write(b"\0")
        with stream.getbuffer() as view:
            fill(view)
    return stream.getvalue()
