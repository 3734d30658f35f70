"""Owns the reading of small tensors that are wanted whole: many in one request, straight into the state."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version

from holdfast._contents.open_files import StoredFile
from holdfast._format.item_table import Payload, StorageInfo
from holdfast._io.blocks import crc32, crc32_in_one_turn
from holdfast._io.local_buffers import BUFFER_NBYTES, borrow, give_back
from holdfast._io.store import StoreTraits
from holdfast._plan.read_columns import ReadBox
from holdfast._storage.destinations import Destination, ReadContext
from holdfast._storage.item_places import ItemPlaces
from holdfast._tensors.chunks import find_box
from holdfast._tensors.layout_table import LayoutTable
from holdfast.errors import ChecksumError, MetadataFormatError
from holdfast.planner import ReadItem

_MOST = 512 << 10
"""Larger tensors are read each by itself, straight into their memory. That is less work for a byte, but each
takes several exchanges of the interpreter's lock between the threads, about 0.1 ms."""

_LITTLE = 5 << 10
_FRESH = 256 << 10
"""Memory of this size is taken anew for each request; larger memory is used again, because its pages cost
more than the copy."""


def most_nbytes(block_size: int) -> int:
    """The largest payload that counts as small: it must have one checksum."""
    return min(_MOST, block_size)


def is_small(info: StorageInfo, shape: Sequence[int], item: ReadItem) -> bool:
    """Whether an item is read with its neighbours: raw, at most one block, and wanted whole."""
    return info.is_raw and info.payload_nbytes <= most_nbytes(info.block_size) and item.lengths == shape


@dataclass(frozen=True)
class SmallTensors:
    """Small tensors of one file that are wanted whole, in the order of the file.

    Attributes:
        keys: The key of each.
        starts: Where its elements begin in the file.
        nbytes: How many bytes they take.
        checksums: The CRC-32 of these bytes; None if it is not known.
        dtypes: The dtype that it was saved with.
        values: The state's tensors by key, if the planner does not want to be asked for each.
        boxes: For each tensor which box of the state's tensor it is; None if it is the whole.
        destinations: If the planner wants to be asked: each tensor's destination.
    """

    keys: list[str]
    starts: list[int]
    nbytes: list[int]
    checksums: list[int | None]
    dtypes: list[torch.dtype]
    values: Mapping[str, Any] | None = None
    boxes: Sequence[ReadBox | None] = ()
    destinations: Sequence[Destination] = ()

    @staticmethod
    def of_rows(
        rows: Sequence[int],
        keys: list[str],
        places: ItemPlaces,
        dtypes: Sequence[torch.dtype],
        values: Mapping[str, Any],
        boxes: Sequence[ReadBox | None],
    ) -> "SmallTensors":
        """Items by their rows in the manifest; ``dtypes`` are those of the manifest's properties."""
        offsets, payload_offsets, nbytes = places.offsets, places.payload_offsets, places.payload_nbytes
        block_at, checksums = places.block_at, places.checksums
        numbers, properties = places.directory.numbers, places.directory.properties
        return SmallTensors(
            keys,
            [offsets[row] + payload_offsets[row] for row in rows],
            [nbytes[row] for row in rows],
            [checksums[block_at[row]] if block_at[row] < block_at[row + 1] else None for row in rows],
            [dtypes[properties[numbers[key]]] for key in keys],
            values,
            boxes,
        )

    @staticmethod
    def of_lines(lines: Sequence[tuple[StorageInfo, Destination]]) -> "SmallTensors":
        """Items by the lines of a plan."""
        infos, destinations = [info for info, _ in lines], [destination for _, destination in lines]
        return SmallTensors(
            [destination.key for destination in destinations],
            [info.offset + info.payload_offset for info in infos],
            [info.payload_nbytes for info in infos],
            [int.from_bytes(info.checksums, "little") if info.checksums else None for info in infos],
            [destination.dtype for destination in destinations],
            destinations=destinations,
        )

    def take(self, span: slice) -> "SmallTensors":
        """Neighbours among them."""
        columns: Any = (self.keys, self.starts, self.nbytes, self.checksums, self.dtypes)
        taken: Any = (
            *[column[span] for column in columns],
            self.values,
            self.boxes[span],
            self.destinations[span],
        )
        return SmallTensors(*taken)

    def payloads(self) -> list[Payload]:
        """Those whose checksums are known, each as one block."""
        rows = zip(self.starts, self.nbytes, self.checksums, strict=True)
        return [Payload(start, nbytes, [crc], nbytes) for start, nbytes, crc in rows if crc is not None]

    def targets(self) -> Iterator[torch.Tensor]:
        """Each tensor to be filled; a planner is told that one is filled when the next one is asked for."""
        if self.values is not None:
            layouts = LayoutTable()
            for key, box in zip(self.keys, self.boxes, strict=True):
                value = self.values[key]
                yield value if box is None else find_box(value, key, box.box, layouts)
        for destination in self.destinations:
            target = destination.target()
            destination.touch()
            yield target
            destination.arrived()

    def requests(self, traits: StoreTraits) -> Iterator[slice]:
        """The spans of the tensors that are read in one request."""
        gap, most = traits.read_gap_nbytes, traits.read_nbytes
        begin = first = reach = 0
        for number, (start, nbytes) in enumerate(zip(self.starts, self.nbytes, strict=True)):
            if number == 0:
                first = reach = start
            # Items that overlap are read apart: within a request the last one must reach furthest.
            elif start < reach or start - reach > gap or start + nbytes - first > most:
                yield slice(begin, number)
                begin, first = number, start
            reach = start + nbytes
        if self.keys:
            yield slice(begin, len(self.keys))


def small_tensor_jobs(
    context: ReadContext, file: StoredFile, tensors: SmallTensors
) -> list[Callable[[], None]]:
    """Jobs that read small tensors of one file, neighbours together: 2 microseconds a tensor."""
    return [partial(_read, context, file, tensors, span) for span in tensors.requests(file.store.traits)]


def _read(context: ReadContext, file: StoredFile, tensors: SmallTensors, span: slice) -> None:
    """Read tensors in one request."""
    tensors = tensors.take(span)
    begin = tensors.starts[0]
    nbytes = tensors.starts[-1] + tensors.nbytes[-1] - begin
    with context.budget.hold(nbytes), _scratch(nbytes) as content:
        file.read_neighbours(begin, content, tensors.payloads if context.verify else list)
        if context.verify:
            _check(content, tensors, file.path)
        if tensors.values is not None:
            context.calls.touched += tensors.keys
            _put(content, tensors)
        else:
            with context.calls.lock:
                _put(content, tensors)


@contextlib.contextmanager
def _scratch(nbytes: int) -> Iterator[memoryview]:
    """Memory for so many bytes, with anything in it."""
    if not _FRESH < nbytes <= BUFFER_NBYTES:
        yield memoryview(bytearray(nbytes))
        return
    buffer = borrow()
    try:
        # Not released at the end: an error keeps views of it alive.
        yield memoryview(buffer)[:nbytes]
    finally:
        give_back(buffer)


def _check(content: memoryview, tensors: SmallTensors, path: str) -> None:
    begin = tensors.starts[0]
    for start, nbytes, expected, key in zip(
        tensors.starts, tensors.nbytes, tensors.checksums, tensors.keys, strict=True
    ):
        # Of little memory both keep the interpreter's lock, and crc32 is quicker.
        crc = crc32 if nbytes < _LITTLE else crc32_in_one_turn
        if expected is not None and crc(content[start - begin : start - begin + nbytes]) != expected:
            raise ChecksumError(
                f"{key}: {path}: the {nbytes} bytes at {start} are not the ones that were written. Restore "
                "the file, or load another checkpoint.",
                key=key,
                path=path,
            )


def _put(content: memoryview, tensors: SmallTensors) -> None:
    move, begin = ctypes.memmove, tensors.starts[0]
    memory = ctypes.c_char.from_buffer(content) if len(content) else ctypes.c_char()  # keeps it in its place
    address = ctypes.addressof(memory)
    moved = list[torch.Tensor]()
    # The targets first in the zip: a planner is told of a tensor when the next one is asked for.
    for target, start, nbytes, dtype, key in zip(
        tensors.targets(), tensors.starts, tensors.nbytes, tensors.dtypes, tensors.keys, strict=True
    ):
        if nbytes != target.numel() * dtype.itemsize:
            raise MetadataFormatError(
                f"{key}: a chunk of shape {tuple(target.shape)} does not take {nbytes} bytes, as the "
                "metadata has it",
                key=key,
                found=nbytes,
            )
        if (
            target.dtype is dtype
            and target.is_cpu
            and target.is_contiguous()
            and not target.is_neg()
            and not target.is_conj()
        ):
            move(target.data_ptr(), address + start - begin, nbytes)
            moved.append(target)
        elif nbytes:
            part = content[start - begin : start - begin + nbytes]
            target.detach().copy_(torch.frombuffer(part, dtype=dtype).view(target.shape))
    increment_version(moved)  # as ``copy_`` does: a backward pass that needs what was there must raise
