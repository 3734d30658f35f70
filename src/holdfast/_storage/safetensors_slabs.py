"""Owns what a rank has of tensors that have owners: cut into slabs, copied, and sent to other owners."""

import itertools
import math
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from holdfast._format.item_table import StorageInfo
from holdfast._geometry import Box, intersect
from holdfast._io.blocks import block_count, crc32
from holdfast._io.progress import ProgressTracker
from holdfast._io.streams import copy_bytes
from holdfast._ranks.broadcast import Broadcast
from holdfast._storage.safetensors_owners import StreamPlaces
from holdfast._storage.safetensors_writing import cast_pieces, resolve
from holdfast.planner import SavePlan, SavePlanner, WriteItem
from holdfast.storage import WriteResult

SLAB = 4 << 20
"""The most bytes of a slab."""
CRC = struct.Struct("<I")
"""What is sent before each piece."""


def slabs(shape: Sequence[int], itemsize: int) -> Iterator[Box]:
    """A tensor in boxes that lie in its memory one after the other, each in one piece."""
    if 0 in shape:
        return
    if not shape:
        yield Box((), ())
        return
    # The first dimension whose rows fit into a slab is cut; those before it are one element long.
    row_nbytes = [math.prod(shape[d + 1 :]) * itemsize for d in range(len(shape))]
    cut = next(d for d, nbytes in enumerate(row_nbytes) if nbytes <= SLAB)
    rows = SLAB // row_nbytes[cut]
    for outer in itertools.product(*map(range, shape[:cut])):
        for start in range(0, shape[cut], rows):
            lengths = (*(1 for _ in outer), min(rows, shape[cut] - start), *shape[cut + 1 :])
            yield Box((*outer, start, *(0 for _ in shape[cut + 1 :])), lengths)


def inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """Where a box lies in another that contains it."""
    starts = [at - begin for at, begin in zip(box.offsets, outer.offsets, strict=True)]
    return tuple(slice(at, at + n) for at, n in zip(starts, box.lengths, strict=True))


class _Chunk(NamedTuple):
    """One item of this rank's plan."""

    item: WriteItem
    box: Box


class _OwnTensor(NamedTuple):
    """The chunks that this rank has of one tensor, in the order of their offsets."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[_Chunk]

    @property
    def has_first_element(self) -> bool:
        return not any(self.chunks[0].box.offsets)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class OwnChunks:
    """What this rank has of the model, by the owners of the files that it belongs to."""

    def __init__(
        self, plan: SavePlan, places: StreamPlaces, planner: SavePlanner, progress: ProgressTracker
    ) -> None:
        self._places = places
        self._planner = planner
        self.progress = progress
        self._resolving = threading.Lock()
        found: dict[str, _OwnTensor] = {}
        for item in plan.items:
            data, key = item.tensor_data, item.index.fqn
            assert data is not None, "what is no tensor is refused before"
            if key in places.owners and 0 not in data.chunk.sizes:
                dtype: torch.dtype = getattr(torch, places.places[key][2])
                tensor = found.setdefault(key, _OwnTensor(key, tuple(data.size), dtype, []))
                tensor.chunks.append(_Chunk(item, Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))))
        for tensor in found.values():
            tensor.chunks.sort(key=lambda chunk: chunk.box.offsets)
        self._tensors = found

    def owners(self) -> set[int]:
        """The ranks that write what this one has."""
        return {self._places.owners[key] for key in self._tensors}

    def send(self, owner: int, link: Broadcast, rank: int) -> dict[str, bytes]:
        """Send an owner all that this rank has of its files; return the checksums that it answers with."""
        mine = [tensor for key, tensor in self._tensors.items() if self._places.owners[key] == owner]
        # The order of the owner: its files as all ranks number them, then the places in the file.
        mine.sort(key=lambda tensor: self._order(tensor.key))
        memory = memoryview(bytearray(SLAB))
        for tensor in mine:
            values = self.values(tensor.key)
            for slab in slabs(tensor.shape, tensor.dtype.itemsize):
                for piece in values.pieces(slab, memory):
                    link.send_to_all(memoryview(CRC.pack(crc32(piece))), rank)
                    link.send_to_all(piece, rank)
                    self.progress.advance(len(piece))
        told = [tensor for tensor in mine if tensor.has_first_element]
        answer = memoryview(bytearray(sum(4 * block_count(tensor.nbytes) for tensor in told)))
        link.send_to_all(answer, owner)
        sums, at = {}, 0
        for tensor in told:
            end = at + 4 * block_count(tensor.nbytes)
            sums[tensor.key], at = bytes(answer[at:end]), end
        return sums

    def _order(self, key: str) -> tuple[str, int]:
        file, begin, _ = self._places.places[key]
        return self._places.files[file], begin

    def values(self, key: str) -> "ChunkValues":
        """The values of the chunks of one tensor."""
        tensor = self._tensors[key]
        with self._resolving:
            return ChunkValues(tensor, [resolve(chunk.item, self._planner) for chunk in tensor.chunks])

    def result(self, item: WriteItem, sums: dict[str, bytes]) -> WriteResult:
        """What is known of an item once all is written."""
        data, key = item.tensor_data, item.index.fqn
        assert data is not None
        file, begin, name = self._places.places[key]
        nbytes = data.chunk.sizes.numel() * getattr(torch, name).itemsize
        checksums = sums.get(key, b"") if not any(data.chunk.offsets) else b""
        info = StorageInfo(self._places.files[file], begin, nbytes, checksums=checksums)
        return WriteResult(item.index, nbytes, info)


class ChunkValues(NamedTuple):
    """The chunks of one tensor, with their values."""

    tensor: _OwnTensor
    values: list[torch.Tensor]

    def pieces(self, slab: Box, memory: memoryview) -> Iterator[memoryview]:
        """Copies of what the chunks have of a slab, each in ``memory`` until the next."""
        for number in range(len(self.values)):
            piece = self.piece(number, slab, memory)
            if piece is not None:
                yield piece

    def piece(self, number: int, slab: Box, memory: memoryview) -> memoryview | None:
        """A copy of what one chunk has of a slab; None if that is nothing."""
        box, dtype = self.tensor.chunks[number].box, self.tensor.dtype
        common = intersect(slab, box)
        if common is None:
            return None
        part = self.values[number][inside(common, box)]
        piece = memory[: math.prod(common.lengths) * dtype.itemsize]
        at = 0
        for run in cast_pieces(part, dtype, SLAB):
            copy_bytes(piece[at : at + len(run)], run)
            at += len(run)
        assert at == len(piece), "the shape of the values was checked"
        return piece
