"""Owns the reading of small tensors that are wanted whole: many in one request, straight into the state."""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version

from holdfast._format.item_table import Payload, StorageInfo
from holdfast._io.blocks import crc32
from holdfast._io.store import StoreTraits
from holdfast._plan.read_columns import ReadBox
from holdfast._storage.destinations import Destination, ReadContext
from holdfast._storage.item_places import ItemPlaces
from holdfast._storage.open_files import SharedFile
from holdfast._storage.small_items import SMALL
from holdfast._tensors.chunks import find_box
from holdfast._tensors.layout_table import LayoutTable
from holdfast.errors import ChecksumError, MetadataFormatError
from holdfast.planner import ReadItem


def is_small(info: StorageInfo, shape: Sequence[int], item: ReadItem) -> bool:
    """Whether an item is read with its neighbours: raw, at most one block, and wanted whole."""
    return info.is_raw and info.payload_nbytes < SMALL and item.lengths == shape


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
    context: ReadContext, file: SharedFile, tensors: SmallTensors
) -> list[Callable[[], None]]:
    """Jobs that read small tensors of one file, neighbours together: 2 microseconds a tensor."""
    return [partial(_read, context, file, tensors, span) for span in tensors.requests(file.store.traits)]


def _read(context: ReadContext, file: SharedFile, tensors: SmallTensors, span: slice) -> None:
    """Read tensors in one request."""
    tensors = tensors.take(span)
    begin = tensors.starts[0]
    nbytes = tensors.starts[-1] + tensors.nbytes[-1] - begin
    with context.budget.hold(nbytes):
        content = bytearray(max(nbytes, 1))
        file.read_neighbours(
            begin, memoryview(content)[:nbytes], tensors.payloads if context.verify else list
        )
        if context.verify:
            _check(content, tensors, file.path)
        with context.calls.lock:
            if tensors.values is not None:
                context.calls.touched += tensors.keys
            _put(content, tensors)


def _check(content: bytearray, tensors: SmallTensors, path: str) -> None:
    view, crc, begin = memoryview(content), crc32, tensors.starts[0]
    for start, nbytes, expected, key in zip(
        tensors.starts, tensors.nbytes, tensors.checksums, tensors.keys, strict=True
    ):
        if expected is not None and crc(view[start - begin : start - begin + nbytes]) != expected:
            raise ChecksumError(
                f"{key}: {path}: the {nbytes} bytes at {start} are not the ones that were written. Restore "
                "the file, or load another checkpoint.",
                key=key,
                path=path,
            )


def _put(content: bytearray, tensors: SmallTensors) -> None:
    memory, move = (ctypes.c_ubyte * len(content)).from_buffer(content), ctypes.memmove
    address, begin = ctypes.addressof(memory), tensors.starts[0]
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
            part = memoryview(content)[start - begin : start - begin + nbytes]
            target.detach().copy_(torch.frombuffer(part, dtype=dtype).view(target.shape))
    increment_version(moved)  # as ``copy_`` does: a backward pass that needs what was there must raise
