"""Owns the bytes of a stored value that is not a tensor, and the values among them that are plain data."""

from typing import Any, NamedTuple

from holdfast._contents.item_bytes import ItemBytes, read_transformed
from holdfast._format.torch_item_zip import Archive
from holdfast.errors import IntegrityError

# How a pickle of nothing but bytes begins; their length follows.
_BYTES, _BYTEARRAY = b"\x80\x04\x8e", b"\x80\x05\x96"


class ObjectBytes(NamedTuple):
    """A stored value.

    Attributes:
        head: What stands before the payload in a container of ours; empty if the payload is the container.
        payload: Raw bytes, a pickle, or a whole container.
        tail: What stands after it.
    """

    head: bytes
    payload: bytes | bytearray
    tail: bytes


def read_object(item: ItemBytes) -> ObjectBytes:
    """Read a value, checked."""
    info = item.info
    if info.transform_descriptors:
        return ObjectBytes(b"", read_transformed(item), b"")
    if not info.is_located:
        return ObjectBytes(b"", item.read_unchecked(), b"")
    head, tail = item.read_wrap()
    if head[-11:-8] == _BYTEARRAY:
        content = bytearray(info.payload_nbytes)
        item.read(0, memoryview(content))
        return ObjectBytes(head, content, tail)
    return ObjectBytes(head, item.read_payload(), tail)


def is_raw(head: bytes, payload: bytes | bytearray) -> bool:
    """Whether the value is the payload itself: bytes or a bytearray that we stored."""
    size = len(payload).to_bytes(8, "little")
    return head.endswith((_BYTES + size, _BYTEARRAY + size))


class NotPlainError(Exception):
    """A value is more than plain data: whoever reads it needs torch, or the classes that it names."""


def plain_value(stored: ObjectBytes, *, path: str) -> Any:
    """A value of plain data: dict, list, tuple, set, str, bytes, numbers, None. No code of it runs.

    A ``torch.Size`` comes as a tuple, a path as a str.

    Raises:
        NotPlainError: It is something else, or damaged.
    """
    # A tenth of the time that `holdfast ls` may take.
    from holdfast._format.torch_pickle import read_plain_pickle  # noqa: PLC0415

    try:
        if stored.head:
            if is_raw(stored.head, stored.payload):
                return stored.payload
            return read_plain_pickle(bytes(stored.payload), path=path)
        content = bytes(stored.payload)
        archive = Archive(
            lambda offset, nbytes: content[offset : offset + nbytes], len(content), path=path, key=None
        )
        pickled = archive.records.get("data.pkl")
        if pickled is None or not pickled.plain:
            raise NotPlainError("no pickle of torch.save")
        return read_plain_pickle(archive.read_record(pickled), path=path)
    except IntegrityError as error:
        raise NotPlainError(str(error)) from error
