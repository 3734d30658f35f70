"""Owns the reading of small tensors that are wanted whole: many in one request, straight into the state."""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast._io.blocks import crc32
from holdfast._io.store import StoreTraits
from holdfast._storage.destinations import Destination
from holdfast._storage.item_places import ItemPlaces
from holdfast._storage.item_reader import Chunk, ReadContext
from holdfast._storage.open_files import SharedFile
from holdfast._storage.small_items import SMALL
from holdfast.errors import ChecksumError, MetadataFormatError
from holdfast.planner import ReadItem

__all__ = ["SmallTensors", "is_small", "small_tensor_jobs"]


def is_small(chunk: Chunk, item: ReadItem) -> bool:
    """Whether an item is read with its neighbours: raw, at most one block, and wanted whole."""
    info = chunk.info
    return 0 <= info.payload_nbytes < SMALL and not info.transform_descriptors and item.lengths == chunk.shape


class SmallTensors:
    """Small tensors of one file that are wanted whole, in the order of the file.

    Attributes:
        keys: The key of each.
        starts: Where its elements begin in the file.
        nbytes: How many bytes they take.
        checksums: The CRC-32 of these bytes.
        dtypes: The dtype that it was saved with.
        values: The state's tensors by key, if the planner does not want to be asked for each.
        destinations: Otherwise each tensor's destination.
    """

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.starts: list[int] = []
        self.nbytes: list[int] = []
        self.checksums: list[int] = []
        self.dtypes: list[torch.dtype] = []
        self.values: Mapping[str, Any] = {}
        self.destinations: list[Destination] | None = None

    @staticmethod
    def of_rows(
        rows: Sequence[int],
        keys: list[str],
        places: ItemPlaces,
        dtypes: Sequence[torch.dtype],
        values: Mapping[str, Any],
    ) -> "SmallTensors":
        """Items by their rows in the manifest; ``dtypes`` are those of the manifest's properties."""
        made, directory = SmallTensors(), places.directory
        offsets, payload_offsets, nbytes = places.offsets, places.payload_offsets, places.payload_nbytes
        block_at, checksums = places.block_at, places.checksums
        made.keys = keys
        made.starts = [offsets[row] + payload_offsets[row] for row in rows]
        made.nbytes = [nbytes[row] for row in rows]
        made.checksums = [checksums[block_at[row]] if nbytes[row] else 0 for row in rows]
        numbers, properties = directory.numbers, directory.properties
        made.dtypes = [dtypes[properties[numbers[key]]] for key in keys]
        made.values = values
        return made

    @staticmethod
    def of_lines(context: ReadContext, lines: Sequence[tuple[Chunk, ReadItem]]) -> "SmallTensors":
        """Items by the lines of a plan."""
        made = SmallTensors()
        made.keys = [item.dest_index.fqn for _, item in lines]
        made.starts = [chunk.info.offset + chunk.info.payload_offset for chunk, _ in lines]
        made.nbytes = [chunk.info.payload_nbytes for chunk, _ in lines]
        made.checksums = [int.from_bytes(chunk.info.checksums, "little") for chunk, _ in lines]
        made.dtypes = [chunk.dtype for chunk, _ in lines]
        made.destinations = [Destination(context.calls, item, chunk.dtype) for chunk, item in lines]
        return made

    def requests(self, traits: StoreTraits) -> Iterator[range]:
        """The numbers of the tensors that are read in one request."""
        gap, most = traits.read_gap_nbytes, traits.read_nbytes
        begin = first = reach = 0
        for number, (start, nbytes) in enumerate(zip(self.starts, self.nbytes, strict=True)):
            if number == 0:
                first = reach = start
            # Items that overlap are read apart: within a request the last one must reach furthest.
            elif start < reach or start - reach > gap or start + nbytes - first > most:
                yield range(begin, number)
                begin, first = number, start
            reach = start + nbytes
        if self.keys:
            yield range(begin, len(self.keys))


def small_tensor_jobs(
    context: ReadContext, file: SharedFile, tensors: SmallTensors
) -> list[Callable[[], None]]:
    """Jobs that read small tensors of one file, neighbours together: 2 microseconds a tensor."""
    return [_Request(context, file, tensors, numbers) for numbers in tensors.requests(file.store.traits)]


class _Request:
    """Tensors that are read in one request."""

    def __init__(self, context: ReadContext, file: SharedFile, tensors: SmallTensors, numbers: range) -> None:
        self.context = context
        self.file = file
        self.tensors = tensors
        self.span = slice(numbers.start, numbers.stop)

    def __call__(self) -> None:
        tensors, span, calls = self.tensors, self.span, self.context.calls
        starts, sizes = tensors.starts[span], tensors.nbytes[span]
        begin, nbytes = starts[0], starts[-1] + sizes[-1] - starts[0]
        with self.context.budget.hold(nbytes):
            content = bytearray(max(nbytes, 1))
            self.file.read_into(begin, memoryview(content)[:nbytes])
            if self.context.verify:
                self._check(content, starts, sizes)
            with calls.lock:
                if tensors.destinations is None:
                    calls.touched += tensors.keys[span]
                self._put(content, starts, sizes)

    def _check(self, content: bytearray, starts: list[int], sizes: list[int]) -> None:
        view, crc, begin = memoryview(content), crc32, starts[0]
        for start, nbytes, expected, key in zip(
            starts, sizes, self.tensors.checksums[self.span], self.tensors.keys[self.span], strict=True
        ):
            if crc(view[start - begin : start - begin + nbytes]) != expected:
                raise ChecksumError(
                    f"{key}: {self.file.path}: the {nbytes} bytes at {start} are not the ones that "
                    "were written. Restore the file, or load another checkpoint.",
                    key=key,
                    path=self.file.path,
                )

    def _put(self, content: bytearray, starts: list[int], sizes: list[int]) -> None:
        tensors, move = self.tensors, ctypes.memmove
        memory = (ctypes.c_ubyte * len(content)).from_buffer(content)
        address, begin = ctypes.addressof(memory), starts[0]
        # First in the zip: a planner is told of a tensor when the next one is asked for.
        for target, start, nbytes, dtype, key in zip(
            self._targets(), starts, sizes, tensors.dtypes[self.span], tensors.keys[self.span], strict=True
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
            elif nbytes:
                part = memoryview(content)[start - begin : start - begin + nbytes]
                target.detach().copy_(torch.frombuffer(part, dtype=dtype).view(target.shape))

    def _targets(self) -> Iterator[torch.Tensor]:
        tensors = self.tensors
        if tensors.destinations is None:
            return map(tensors.values.__getitem__, tensors.keys[self.span])
        return _each_in_turn(tensors.destinations[self.span])


def _each_in_turn(destinations: list[Destination]) -> Iterator[torch.Tensor]:
    """Each tensor to be filled; it counts as filled when the next one is asked for."""
    for destination in destinations:
        yield destination.target()
        destination.arrived()
