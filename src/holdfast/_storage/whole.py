"""Small tensors that are wanted whole, read many at a time and put straight into the state's memory."""

import ctypes
from collections.abc import Callable, Iterator

import torch

from holdfast._io.blocks import crc32
from holdfast._storage.open_files import SharedFile
from holdfast._storage.packs import GAP, PACK, damaged
from holdfast._storage.source import ReadContext
from holdfast._storage.wanted import WholeTensors
from holdfast.errors import MetadataFormatError

__all__ = ["whole_jobs"]


def whole_jobs(context: ReadContext, file: SharedFile, tensors: WholeTensors) -> list[Callable[[], None]]:
    """Jobs that read the tensors of one file, neighbours together: 2 microseconds a tensor."""
    return [_Pack(context, file, tensors, begin, end) for begin, end in _packs(tensors)]


def _packs(tensors: WholeTensors) -> Iterator[tuple[int, int]]:
    """Which of the tensors, from the first to the one after the last, are read in one request."""
    shelf = tensors.shelf
    begin, start, reach = 0, None, 0
    for number, row in enumerate(tensors.rows):
        at = shelf.start[row] + shelf.payload_start[row]
        end = at + shelf.payload_nbytes[row]
        if start is None:
            start = at
        elif at - reach > GAP or end - start > PACK:
            yield begin, number
            begin, start = number, at
        reach = end
    if tensors.rows:
        yield begin, len(tensors.rows)


class _Pack:
    """Tensors whose payloads are read in one request."""

    def __init__(
        self, context: ReadContext, file: SharedFile, tensors: WholeTensors, begin: int, end: int
    ) -> None:
        self.context = context
        self.file = file
        self.tensors = tensors
        self.rows = tensors.rows[begin:end]
        self.keys = tensors.keys[begin:end]

    def __call__(self) -> None:
        shelf, rows = self.tensors.shelf, self.rows
        begin = shelf.start[rows[0]] + shelf.payload_start[rows[0]]
        last = rows[-1]
        nbytes = shelf.start[last] + shelf.payload_start[last] + shelf.payload_nbytes[last] - begin
        with self.context.budget.hold(nbytes):
            content = bytearray(max(nbytes, 1))
            self.file.reader().read_into(begin, memoryview(content)[:nbytes])
            starts = [shelf.start[row] + shelf.payload_start[row] - begin for row in rows]
            if self.context.verify:
                self._check(content, starts)
            with self.context.counter.lock:
                self.context.counter.touched += self.keys
                self._put(content, starts)

    def _check(self, content: bytearray, starts: list[int]) -> None:
        shelf, view, crc = self.tensors.shelf, memoryview(content), crc32
        nbytes, block_at, checksums = shelf.payload_nbytes, shelf.block_at, shelf.checksums
        for start, row, key in zip(starts, self.rows, self.keys, strict=True):
            end = start + nbytes[row]
            if end > start and crc(view[start:end]) != checksums[block_at[row]]:
                raise damaged(key, self.file.path, shelf.start[row] + shelf.payload_start[row], nbytes[row])

    def _put(self, content: bytearray, starts: list[int]) -> None:
        shelf, values, move = self.tensors.shelf, self.tensors.values, ctypes.memmove
        memory = (ctypes.c_ubyte * len(content)).from_buffer(content)
        address = ctypes.addressof(memory)
        dtype_of, payload_nbytes = self.tensors.dtype, shelf.payload_nbytes
        for start, row, key in zip(starts, self.rows, self.keys, strict=True):
            target, nbytes, dtype = values[key], payload_nbytes[row], dtype_of(key)
            if nbytes != target.numel() * dtype.itemsize:
                raise _wrong_size(key, target, nbytes)
            if (
                target.dtype is dtype
                and target.is_cpu
                and target.is_contiguous()
                and not target.is_neg()
                and not target.is_conj()
            ):
                move(target.data_ptr(), address + start, nbytes)
            elif nbytes:
                part = memoryview(content)[start : start + nbytes]
                target.detach().copy_(torch.frombuffer(part, dtype=dtype).view(target.shape))


def _wrong_size(key: str, target: torch.Tensor, nbytes: int) -> MetadataFormatError:
    return MetadataFormatError(
        f"{key}: a chunk of shape {tuple(target.shape)} does not take {nbytes} bytes, as the metadata has it",
        key=key,
        found=nbytes,
    )
