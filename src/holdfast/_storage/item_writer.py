"""Items into a file: containers around raw bytes, checksummed on the way, small ones packed together."""

import functools
import io
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from holdfast._format.torch_item import ItemFrame, tensor_item
from holdfast._io.blocks import BLOCK_SIZE, BlockSums, combine_blocks, crc32
from holdfast._io.store import FileWriter
from holdfast._objects import StoredObject
from holdfast._storage.record import StorageInfo
from holdfast._tensors.host import copy_of, host_pieces
from holdfast.errors import IncompleteWriteError
from holdfast.extension import StreamTransformExtension
from holdfast.planner import WriteItem
from holdfast.storage import WriteResult

__all__ = ["ItemWriter"]

# Below this an item is assembled in memory with its neighbours: three calls to the file for each of
# 100,000 tensors of 16 bytes would take longer than everything else together.
_SMALL = 128 * 1024
_PACK = 4 * 1024 * 1024


class ItemWriter:
    """Writes items one after the other into one new file, and says where each of them lies.

    Args:
        file: Where to.
        name: The file's name in the checkpoint.
        transforms: What each item's container goes through; the first one stands next to the file.
        copy_at_once: How many bytes of a tensor are copied at a time, if it must be copied.
    """

    def __init__(
        self,
        file: FileWriter,
        name: str,
        transforms: Sequence[StreamTransformExtension] = (),
        *,
        copy_at_once: int,
    ) -> None:
        self.file = file
        self.name = name
        self.transforms = transforms
        self.copy_at_once = copy_at_once
        self.descriptors = tuple(transform.get_descriptor() for transform in transforms) or None
        self.results: list[WriteResult] = []
        self._packed: list[Any] = []
        self._packed_nbytes = 0

    def add(self, write_item: WriteItem, data: torch.Tensor | io.BytesIO) -> None:
        """Write one item. The data may be changed as soon as this returns."""
        if isinstance(data, torch.Tensor):
            item = _frame(data.dtype, data.shape)
            _check_planned(write_item, data)
        elif isinstance(data, StoredObject):
            item = data.item
        else:
            self._add_stream(write_item, data)
            return
        if self.transforms:
            self._add_transformed(write_item, item, data)
        elif item.payload_nbytes < _SMALL:
            self._add_small(write_item, item, data)
        else:
            self._add_large(write_item, item, data)

    def finish(self) -> list[WriteResult]:
        """Make everything durable, and return one result for each item."""
        self._flush()
        self.file.finish()
        return self.results

    def _flush(self) -> None:
        if self._packed:
            packed, self._packed, self._packed_nbytes = b"".join(self._packed), [], 0
            self.file.write(packed)

    def _add_small(self, write_item: WriteItem, item: ItemFrame, data: torch.Tensor | StoredObject) -> None:
        position = self.file.position + self._packed_nbytes
        # Copied at once, so that the caller may change it.
        payload = copy_of(data) if isinstance(data, torch.Tensor) else bytes(data.payload)
        checksum = crc32(payload)
        head, tail = item.head(position), item.tail(position, checksum)
        self._packed += (head, payload, tail)
        nbytes = len(head) + len(payload) + len(tail)
        self._packed_nbytes += nbytes
        checksums = checksum.to_bytes(4, "little") if payload else b""
        wrap = crc32(tail, crc32(head))
        self._record(write_item, position, nbytes, len(head), len(payload), nbytes, checksums, wrap)
        if self._packed_nbytes >= _PACK:
            self._flush()

    def _add_large(self, write_item: WriteItem, item: ItemFrame, data: torch.Tensor | StoredObject) -> None:
        self._flush()
        position = self.file.position
        head = item.head(position)
        self.file.write(head)
        sums = BlockSums(BLOCK_SIZE)
        for piece in self._pieces(data):
            self.file.write(piece, sums)
        blocks = sums.finish()
        tail = item.tail(position, combine_blocks(blocks, item.payload_nbytes))
        self.file.write(tail)
        nbytes = self.file.position - position
        wrap = crc32(tail, crc32(head))
        self._record(
            write_item, position, nbytes, len(head), item.payload_nbytes, nbytes, _little(blocks), wrap
        )

    def _add_stream(self, write_item: WriteItem, data: io.BytesIO) -> None:
        """An item in a container that somebody else made."""
        if self.transforms:
            self._add_transformed(write_item, None, data)
            return
        self._flush()
        position = self.file.position
        sums = BlockSums(BLOCK_SIZE)
        with data.getbuffer() as content:
            self.file.write(content, sums)
        nbytes = self.file.position - position
        self._record(write_item, position, nbytes, 0, nbytes, nbytes, _little(sums.finish()), 0)

    def _add_transformed(
        self, write_item: WriteItem, item: ItemFrame | None, data: torch.Tensor | io.BytesIO
    ) -> None:
        self._flush()
        position = self.file.position
        sink = _Sink(self.file)
        stream: Any = sink
        for transform in self.transforms:
            stream = transform.transform_to(stream)
        if item is None:
            assert isinstance(data, io.BytesIO)
            with data.getbuffer() as content:
                raw_nbytes = _write_all(stream, content)
        else:
            assert isinstance(data, torch.Tensor | StoredObject)
            raw_nbytes = _write_all(stream, item.head(0))
            checksum = 0
            for piece in self._pieces(data):
                for start in range(0, len(piece), BLOCK_SIZE):
                    part = piece[start : start + BLOCK_SIZE]
                    checksum = crc32(part, checksum)
                    raw_nbytes += _write_all(stream, part)
            raw_nbytes += _write_all(stream, item.tail(0, checksum))
        stream.close()
        nbytes = self.file.position - position
        checksums = _little(sink.sums.finish())
        self._record(write_item, position, nbytes, 0, nbytes, raw_nbytes, checksums, 0)

    def _pieces(self, data: torch.Tensor | StoredObject) -> Iterable[memoryview]:
        if isinstance(data, StoredObject):
            return (data.payload,)
        return host_pieces(data, self.copy_at_once)

    def _record(
        self,
        write_item: WriteItem,
        position: int,
        nbytes: int,
        payload_offset: int,
        payload_nbytes: int,
        raw_nbytes: int,
        checksums: bytes,
        wrap: int,
    ) -> None:
        place = StorageInfo(
            self.name,
            position,
            nbytes,
            self.descriptors,
            payload_offset,
            payload_nbytes,
            raw_nbytes,
            checksums,
            wrap,
        )
        self.results.append(WriteResult(write_item.index, nbytes, place))


@functools.lru_cache(maxsize=4096)
def _frame(dtype: torch.dtype, shape: torch.Size) -> ItemFrame:
    return tensor_item(str(dtype).removeprefix("torch."), tuple(shape))


def _check_planned(write_item: WriteItem, data: torch.Tensor) -> None:
    planned = write_item.tensor_data
    if planned is None or data.shape != planned.chunk.sizes or data.dtype != planned.properties.dtype:
        expected = None if planned is None else (tuple(planned.chunk.sizes), planned.properties.dtype)
        raise IncompleteWriteError(
            f"{write_item.index.fqn}: planned {expected}, but the planner gave a tensor of shape "
            f"{tuple(data.shape)} and {data.dtype}. create_local_plan and resolve_data must agree.",
            key=write_item.index.fqn,
            expected=expected,
            found=(tuple(data.shape), data.dtype),
        )


def _little(blocks: "array[int]") -> bytes:
    if array("H", [1]).tobytes() == b"\0\1":
        blocks = array("I", blocks)
        blocks.byteswap()
    return blocks.tobytes()


def _write_all(stream: Any, data: Any) -> int:
    """Write all of ``data``, whatever portions the stream takes."""
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    done = 0
    while done < len(view):
        done += stream.write(view[done:]) or 0
    return len(view)


class _Sink(io.RawIOBase):
    """The file's end of a stack of transforms: checksums what arrives, and leaves the file open."""

    def __init__(self, file: FileWriter) -> None:
        super().__init__()
        self.file = file
        self.sums = BlockSums(BLOCK_SIZE)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        self.file.write(view, self.sums)
        return len(view)
