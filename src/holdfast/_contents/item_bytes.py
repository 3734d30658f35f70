"""Owns the bytes of one stored item: read from its file and checked as they are read, transforms undone."""

import contextlib
import ctypes
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

from holdfast._byte_ranges import USUAL, Thrift
from holdfast._format.item_table import Payload, StorageInfo
from holdfast._io.blocks import crc32
from holdfast._io.pool import Budget, Cancellation
from holdfast._io.store import FileSource
from holdfast._io.streams import memory_at
from holdfast.errors import CheckpointError, ChecksumError, IntegrityError, MetadataFormatError
from holdfast.extension import ExtensionRegistry, StreamTransformExtension

_STEP = 1 << 20
_MOST_TRANSFORMS = 32
# What torch wrote does not say how large an object is behind its transforms.
LARGEST_UNDECLARED = 4 << 30


class ItemFile(Protocol):
    """The file of an item: a ``FileReader``, or what reads through one."""

    @property
    def path(self) -> str:
        """How the user would name it."""

    def read_into(self, offset: int, buffer: memoryview, /) -> None:
        """As ``FileReader.read_into``."""

    def read_blocks_into(self, buffer: memoryview, payload: Payload, start: int, /) -> None:
        """As ``FileReader.read_blocks_into``."""


@dataclass(frozen=True)
class ItemRules:
    """How items are read.

    Attributes:
        store: The checkpoint.
        registry: Makes transforms from their descriptors.
        cancellation: Says that another job failed.
        budget: Bounds the scratch memory of all jobs together.
        verify: Whether checksums are compared.
        thrift: What may be read besides what is wanted.
    """

    store: FileSource
    registry: ExtensionRegistry
    cancellation: Cancellation
    budget: Budget
    verify: bool
    thrift: Thrift = USUAL


@dataclass(frozen=True)
class ItemBytes:
    """Reads one item of a file.

    Attributes:
        context: How it is read.
        file: Where it lies.
        info: What is known of it.
    """

    context: ItemRules
    file: ItemFile
    info: StorageInfo

    @property
    def is_verified(self) -> bool:
        """Whether what is read is compared with checksums."""
        return self.context.verify and self.info.is_checked

    def read(self, start: int, view: memoryview) -> None:
        """Fill ``view`` with the payload's bytes from ``start`` on, and check them if that can be done."""
        payload = self.info.payload
        if self.is_verified:
            self.file.read_blocks_into(view, payload, start)
        else:
            self.file.read_into(payload.offset + start, view)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the item, container included, unchecked; fewer than asked for at its end."""
        data = bytearray(max(0, min(nbytes, self.info.length - offset)))
        self.file.read_into(self.info.offset + offset, memoryview(data))
        return bytes(data)

    def read_payload(self) -> bytes:
        """The whole payload, checked."""
        return _filled(self.info.payload_nbytes, lambda view: self.read(0, view))

    def read_unchecked(self) -> bytes:
        """The whole item, container included."""
        return _filled(self.info.length, lambda view: self.file.read_into(self.info.offset, view))

    def read_wrap(self) -> tuple[bytes, bytes]:
        """What stands before and after the payload, checked."""
        before, after = self.info.payload_offset, self.info.payload_offset + self.info.payload_nbytes
        head, tail = self.read_at(0, before), self.read_at(after, self.info.length - after)
        if self.context.verify and crc32(tail, crc32(head)) != self.info.wrap_checksum:
            raise self.damaged("has another container than the one that was written", ChecksumError)
        return head, tail

    def damaged(self, what: str, kind: type[IntegrityError] = IntegrityError, **facts: Any) -> IntegrityError:
        """An error that says what is wrong with the item, and where the item is."""
        path = self.file.path
        return kind(f"{path}: the item at {self.info.offset} {what}", path=path, **facts)

    def stream(self) -> io.BufferedReader:
        """The payload from front to back."""
        return io.BufferedReader(_Stream(self), self.info.block_size)


class _Stream(io.RawIOBase):
    def __init__(self, reader: ItemBytes) -> None:
        super().__init__()
        self.reader = reader
        self.name = reader.file.path  # for the errors of transforms
        self.at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        self.reader.context.cancellation.check()
        left = self.reader.info.length - self.at
        # A block that is read in two portions is read twice to be checked: never more than one at once.
        view = memoryview(buffer).cast("B")[: min(left, self.reader.info.block_size)]
        if view:
            self.reader.read(self.at, view)
            self.at += len(view)
        return len(view)


def undo_transforms(reader: ItemBytes) -> Any:
    """The item's container as a stream."""
    stream: Any = reader.stream()
    for transform in transforms_of(reader.info, reader.context.registry, path=reader.file.path):
        stream = transform.transform_from(stream)
    return stream


def transforms_of(
    info: StorageInfo, registry: ExtensionRegistry, *, path: str
) -> list[StreamTransformExtension]:
    """What an item went through, in the order in which a reader undoes it.

    Raises:
        MetadataFormatError: There are too many.
        ExtensionError: One is not known.
    """
    descriptors = list(info.transform_descriptors or ())
    if len(descriptors) > _MOST_TRANSFORMS:
        raise MetadataFormatError(
            f"{path}: the item at {info.offset} has {len(descriptors)} transforms; more than "
            f"{_MOST_TRANSFORMS} are not undone",
            path=path,
            found=len(descriptors),
        )
    # Those of a registry of torch's are of torch's class, and do the same.
    return cast("list[StreamTransformExtension]", registry.from_descriptor_list(descriptors))


def read_transformed(reader: ItemBytes, *, limit: int = LARGEST_UNDECLARED) -> bytes:
    """The whole container.

    Raises:
        IntegrityError: It is larger than declared, or than ``limit`` where nothing is declared.
    """
    declared = reader.info.raw_nbytes if reader.info.raw_nbytes >= 0 else None
    limit = limit if declared is None else declared
    collected, stream = io.BytesIO(), undo_transforms(reader)
    while piece := stream.read(_STEP):
        collected.write(piece)
        if collected.tell() > limit:
            raise reader.damaged(f"inflates beyond {limit} bytes", expected=limit)
    if declared is not None and (found := collected.tell()) != declared:
        what = f"has {found} bytes behind its transforms, expected {declared}"
        raise reader.damaged(what, expected=declared, found=found)
    return collected.getvalue()


@contextlib.contextmanager
def naming(key: str, path: str | None = None) -> Iterator[None]:
    """Put the key into an error that knows only the file, and the file into one that knows only the key."""
    try:
        yield
    except CheckpointError as error:
        text = str(error) if error.key is not None else f"{key}: {error}"
        if isinstance(error, IntegrityError) and error.path is None and path is not None:
            text = f"{text} (in {path})"
        elif error.key is not None:
            raise
        raise type(error)(
            text,
            key=error.key or key,
            path=error.path or path,
            expected=error.expected,
            found=error.found,
        ) from error


_COPIED = 64 * 1024
_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_address_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))


def _filled(nbytes: int, fill: Callable[[memoryview], None]) -> bytes:
    """A ``bytes`` object with the content that ``fill`` writes; memory for it is taken once, if it is large.

    A new one may be filled by its owner, as Python's C interface has it. Views of a BytesIO would do without
    that, but one that an exception keeps alive makes Python 3.12.1 crash.
    """
    if nbytes < _COPIED:
        content = bytearray(nbytes)
        fill(memoryview(content))
        return bytes(content)
    made: bytes = _new_bytes(None, nbytes)
    fill(memory_at(_address_of(made), nbytes, made))
    return made


def new_memory(nbytes: int) -> memoryview:
    """Memory with anything in it: large memory is not filled with zeros first."""
    if nbytes < _COPIED:
        return memoryview(bytearray(nbytes))
    made = _new_bytes(None, nbytes)
    return memory_at(_address_of(made), nbytes, made)
