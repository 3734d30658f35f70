"""Owns writing tensors that several ranks have parts of, and that one of them writes: their owner.

Where files can only be written from front to back, a rank owns all tensors of a file. The owner goes through
its tensors slab by slab: a slab is some rows of one tensor, a few MiB. The other ranks go through the same
slabs, and send the owner what they have of each. A rank has one thread for what it owns, and one for each
owner that it sends to. So a thread waits only for the next bytes of one stream, both ends of which have them
in the same order, and ranks never wait for each other in a circle. What was sent but not written yet is in
the buffers of sockets: memory stays bounded, because a sender waits for an owner that is slower.
"""

import itertools
import math
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple, Protocol

import torch

from holdfast._format.item_table import StorageInfo
from holdfast._geometry import Box, intersect
from holdfast._io import pool
from holdfast._io.blocks import block_count, crc32
from holdfast._io.copying import copy_bytes
from holdfast._io.file_access import FileWriter, RangeWriter
from holdfast._io.pool import Cancellation
from holdfast._io.progress import ProgressTracker
from holdfast._io.range_ring import RangeRing
from holdfast._io.range_sums import RangeSums
from holdfast._io.store import ByteStore
from holdfast._ranks.broadcast import Broadcast
from holdfast._storage.safetensors_owners import OwnedFile, OwnedTensor, StreamPlaces
from holdfast._storage.safetensors_writing import cast_pieces, resolve
from holdfast._tensors.host import memory_of
from holdfast.errors import ChecksumError
from holdfast.planner import SavePlan, SavePlanner, WriteItem
from holdfast.storage import WriteResult

SLAB = 4 << 20
"""The most bytes of a slab."""
_CRC = struct.Struct("<I")

OpenBroadcast = Callable[[Sequence[int], Callable[[], None]], Broadcast]
"""Connects ranks: ``Exchange.open_broadcast``."""


def write_streams(
    store: ByteStore,
    plan: SavePlan,
    planner: SavePlanner,
    *,
    rank: int,
    open_broadcast: OpenBroadcast | None,
    progress: ProgressTracker,
) -> list[WriteResult]:
    """Write the tensors that this rank owns, and give other owners what this rank has of theirs.

    Every rank of the save calls it, in the part of a step. On return all tensors are on stable storage
    that this rank owns or has something of.

    Args:
        store: The place.
        plan: What this rank has. Its ``storage_data`` are the ``StreamPlaces`` of this rank.
        planner: Gives the data.
        rank: This rank.
        open_broadcast: Connects ranks; None if this rank has all of the model.
        progress: Is told of the bytes of the plan that were written or sent. An exception that it raises
            stops the write.

    Returns:
        For each item whose tensor has an owner, where the tensor begins in which file. The item with the
        first element of a tensor has the checksums of the whole tensor.
    """
    places = plan.storage_data
    assert isinstance(places, StreamPlaces)
    cancellation = Cancellation()
    own = _OwnChunks(plan, places, planner, progress)
    senders = {chunk.rank for file in places.owned for tensor in file.tensors for chunk in tensor.chunks}
    pairs = {(sender, rank) for sender in senders} | {(rank, owner) for owner in own.owners()}
    with ExitStack() as stack:
        # In an order that is the same on all ranks: nobody waits for a rank that waits for a later pair.
        connections = {
            pair: stack.enter_context(_connect(open_broadcast, pair, cancellation))
            for pair in sorted(pairs)
            if pair[0] != pair[1]
        }
        incoming = {sender: link for (sender, owner), link in connections.items() if owner == rank}
        jobs: list[Callable[[], dict[str, bytes]]] = [
            partial(_Owner(store, rank, own, incoming).write, places.owned)
        ]
        jobs += [
            partial(own.send, owner, link, rank) for (_, owner), link in connections.items() if owner != rank
        ]
        found = pool.run(jobs, threads=len(jobs), cancellation=cancellation)
    sums = {key: value for part in found for key, value in part.items()}
    return [own.result(item, sums) for item in plan.items if item.index.fqn in places.owners]


def _connect(
    open_broadcast: OpenBroadcast | None, pair: tuple[int, int], cancellation: Cancellation
) -> Broadcast:
    assert open_broadcast is not None, "several ranks are refused without it"
    return open_broadcast(pair, cancellation.check)


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


def _inside(box: Box, outer: Box) -> tuple[slice, ...]:
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


class _OwnChunks:
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
                    link.send_to_all(memoryview(_CRC.pack(crc32(piece))), rank)
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

    def values(self, key: str) -> "_Values":
        """The values of the chunks of one tensor."""
        tensor = self._tensors[key]
        with self._resolving:
            return _Values(tensor, [resolve(chunk.item, self._planner) for chunk in tensor.chunks])

    def result(self, item: WriteItem, sums: dict[str, bytes]) -> WriteResult:
        """What is known of an item once all is written."""
        data, key = item.tensor_data, item.index.fqn
        assert data is not None
        file, begin, name = self._places.places[key]
        nbytes = data.chunk.sizes.numel() * getattr(torch, name).itemsize
        checksums = sums.get(key, b"") if not any(data.chunk.offsets) else b""
        info = StorageInfo(self._places.files[file], begin, nbytes, checksums=checksums)
        return WriteResult(item.index, nbytes, info)


class _Values(NamedTuple):
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
        part = self.values[number][_inside(common, box)]
        piece = memory[: math.prod(common.lengths) * dtype.itemsize]
        at = 0
        for run in cast_pieces(part, dtype, SLAB):
            copy_bytes(piece[at : at + len(run)], run)
            at += len(run)
        assert at == len(piece), "the shape of the values was checked"
        return piece


class _EventsOnly(ProgressTracker):
    """The progress of a file that several ranks have parts of: each rank counts the bytes of its own plan."""

    def __init__(self, inner: ProgressTracker) -> None:
        super().__init__()
        self._inner = inner

    def advance(self, nbytes: int) -> None:  # noqa: ARG002 - counted elsewhere
        """Only ask whether to go on."""
        self._inner.advance(0)

    def note(self, event: str, count: int = 1) -> None:
        """Pass it on."""
        self._inner.note(event, count)


class _Output(Protocol):
    """Where an owner writes tensors, one slab after the other."""

    path: str

    def seek(self, offset: int) -> None:
        """Begin a tensor that lies at an offset of the file."""

    def write(self, view: memoryview) -> None:
        """Write what follows."""


class _FromFront(_Output):
    """A file that takes its tensors only in their order."""

    def __init__(self, stream: FileWriter) -> None:
        self.path = stream.path
        self._stream = stream

    def seek(self, offset: int) -> None:
        assert offset == self._stream.position, "the plan has all tensors of the file, in their order"

    def write(self, view: memoryview) -> None:
        self._stream.write(view)


class _AtPlaces(_Output):
    """A file that other ranks write to as well."""

    def __init__(self, ranges: RangeWriter, ring: RangeRing) -> None:
        self.path = ranges.path
        self._ranges, self._ring = ranges, ring
        self._at = 0

    def seek(self, offset: int) -> None:
        self._at = offset

    def write(self, view: memoryview) -> None:
        self._ring.put(self._ranges, self._at, view, _sum_nothing)
        self._at += len(view)


def _count_nothing(nbytes: int) -> None:
    """Each rank counts the bytes of its own plan."""


def _sum_nothing(offset: int, copy: memoryview) -> None:
    """The owner sums slabs itself."""


class _Owner:
    """Writes the files of this rank."""

    def __init__(self, store: ByteStore, rank: int, own: _OwnChunks, incoming: dict[int, Broadcast]) -> None:
        self._store = store
        self._rank = rank
        self._own = own
        self._incoming = incoming
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def write(self, files: Sequence[OwnedFile]) -> dict[str, bytes]:
        """Write them, and tell the ranks that sent something the checksums of what they report.

        Returns:
            The checksums of those tensors whose first element this rank has.
        """
        if files:
            self._slab, self._scratch = (torch.empty(SLAB, dtype=torch.uint8) for _ in range(2))
        told: dict[int, dict[str, bytes]] = {rank: {} for rank in (*self._incoming, self._rank)}
        for file in sorted(files, key=lambda file: file.name):
            with self._open(file) as output:
                for tensor in file.tensors:
                    output.seek(tensor.begin)
                    sums = self._write_tensor(output, tensor)
                    # A plan that does not have all of a tensor is refused later.
                    if tensor.chunks and not any(tensor.chunks[0].box.offsets):
                        told[tensor.chunks[0].rank][tensor.key] = sums
        for rank, link in self._incoming.items():
            link.send_to_all(memoryview(b"".join(told[rank].values())), self._rank)
        return told[self._rank]

    @contextmanager
    def _open(self, file: OwnedFile) -> Iterator["_Output"]:
        """A file, new with its header, or one that is there: on stable storage when the block ends."""
        if file.header is None:
            with self._store.open_ranges(file.name) as ranges, RangeRing(_count_nothing) as ring:
                yield _AtPlaces(ranges, ring)
        else:
            with self._store.create(file.name, nbytes_hint=file.nbytes) as stream:
                stream.progress = _EventsOnly(self._own.progress)
                stream.write(file.header)
                yield _FromFront(stream)

    def _write_tensor(self, output: "_Output", tensor: OwnedTensor) -> bytes:
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        nbytes = math.prod(tensor.shape) * dtype.itemsize
        sums, at = RangeSums(nbytes, 0, nbytes - 1), 0
        is_mine = any(chunk.rank == self._rank for chunk in tensor.chunks)
        values = self._own.values(tensor.key) if is_mine else None
        for slab in slabs(tensor.shape, dtype.itemsize):
            filled = self._fill(slab, tensor, dtype, values, output.path)
            sums.add(at, filled)
            output.write(filled)
            at += len(filled)
        return sums.sums.tobytes()

    def _fill(
        self, slab: Box, tensor: OwnedTensor, dtype: torch.dtype, values: _Values | None, path: str
    ) -> memoryview:
        """One slab, put together from what the ranks have of it."""
        room = self._slab[: math.prod(slab.lengths) * dtype.itemsize]
        number = 0  # among this rank's own chunks
        for chunk in tensor.chunks:
            common = intersect(slab, chunk.box)
            mine, number = number, number + (chunk.rank == self._rank)
            if common is None:
                continue
            target = _bytes_of(room, slab.lengths, dtype)[_byte_slices(common, slab, dtype)]
            is_run = target.is_contiguous()
            memory = memory_of(target if is_run else self._scratch[: target.numel()])
            if chunk.rank == self._rank:
                assert values is not None
                values.piece(mine, slab, memory)
                self._own.progress.advance(len(memory))
            else:
                self._receive(chunk.rank, memory, tensor.key, path)
            if not is_run:
                target.copy_(self._scratch[: target.numel()].view(target.shape))
        return memory_of(room)

    def _receive(self, sender: int, memory: memoryview, key: str, path: str) -> None:
        checksum = memoryview(bytearray(_CRC.size))
        self._incoming[sender].send_to_all(checksum, sender)
        self._incoming[sender].send_to_all(memory, sender)
        if _CRC.unpack(checksum)[0] != crc32(memory):
            raise ChecksumError(
                f"{key}: bytes for {path} were changed on their way from rank {sender}. Save again; if it "
                "happens again, a network device or memory is faulty.",
                key=key,
                path=path,
            )


def _bytes_of(memory: torch.Tensor, lengths: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory with the elements of a box, as an array of bytes with the dimensions of the box."""
    return memory.view(*lengths[:-1], (lengths[-1] if lengths else 1) * dtype.itemsize)


def _byte_slices(box: Box, outer: Box, dtype: torch.dtype) -> tuple[slice, ...]:
    """Where a box lies in another, for an array of bytes."""
    *others, last = _inside(box, outer) or (slice(0, 1),)
    return *others, slice(last.start * dtype.itemsize, last.stop * dtype.itemsize)
