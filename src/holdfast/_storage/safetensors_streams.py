"""Owns writing tensors that several ranks have parts of, and that one of them writes: their owner.

Where files can only be written from front to back, a rank owns all tensors of a file. The owner goes through
its tensors slab by slab: a slab is some rows of one tensor, a few MiB. The other ranks go through the same
slabs, and send the owner what they have of each. A rank has one thread for what it owns, and one for each
owner that it sends to. So a thread waits only for the next bytes of one stream, both ends of which have them
in the same order, and ranks never wait for each other in a circle. What was sent but not written yet is in
the buffers of sockets: memory stays bounded, because a sender waits for an owner that is slower.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from holdfast._geometry import Box, intersect
from holdfast._io import pool
from holdfast._io.blocks import crc32
from holdfast._io.pool import Cancellation
from holdfast._io.progress import ProgressTracker
from holdfast._io.range_ring import RangeRing
from holdfast._io.range_sums import RangeSums
from holdfast._io.store import ByteStore
from holdfast._ranks.broadcast import Broadcast
from holdfast._storage.safetensors_owners import OwnedFile, OwnedTensor, StreamPlaces
from holdfast._storage.safetensors_slabs import CRC, SLAB, ChunkValues, OwnChunks, inside, slabs
from holdfast._tensors.host import memory_of
from holdfast.errors import ChecksumError
from holdfast.planner import SavePlan, SavePlanner
from holdfast.storage import WriteResult

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
    own = OwnChunks(plan, places, planner, progress)
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


Put = Callable[[int, memoryview], None]
"""Writes bytes of a tensor at their place in a file; in the order of the file."""


def _ignore(*_: Any) -> None:
    """Each rank counts the bytes of its own plan, and the owner sums slabs itself."""


class _Owner:
    """Writes the files of this rank."""

    def __init__(self, store: ByteStore, rank: int, own: OwnChunks, incoming: dict[int, Broadcast]) -> None:
        self._store = store
        self._rank = rank
        self._own = own
        self._incoming = incoming
        self._slab = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    def write(self, files: Sequence[OwnedFile]) -> dict[str, bytes]:
        """Write them, and tell the ranks that sent something the checksums of what they report.

        Returns:
            The checksums of those tensors whose first element this rank has.
        """
        if files:
            self._slab, self._scratch = (torch.empty(SLAB, dtype=torch.uint8, device="cpu") for _ in range(2))
        told: dict[int, dict[str, bytes]] = {rank: {} for rank in (*self._incoming, self._rank)}
        for file in sorted(files, key=lambda file: file.name):
            with self._open(file) as put:
                for tensor in file.tensors:
                    sums = self._write_tensor(put, tensor, f"{self._store.url}/{file.name}")
                    # A plan that does not have all of a tensor is refused later.
                    if tensor.chunks and not any(tensor.chunks[0].box.offsets):
                        told[tensor.chunks[0].rank][tensor.key] = sums
        for rank, link in self._incoming.items():
            link.send_to_all(memoryview(b"".join(told[rank].values())), self._rank)
        return told[self._rank]

    @contextmanager
    def _open(self, file: OwnedFile) -> Iterator[Put]:
        """A file, new with its header, or one that is there: on stable storage when the block ends."""
        if file.header is None:
            with self._store.open_ranges(file.name) as ranges, RangeRing(_ignore) as ring:
                yield lambda at, view: ring.put(ranges, at, view, _ignore)
        else:
            with self._store.create(file.name, nbytes_hint=file.nbytes) as stream:
                stream.progress = _EventsOnly(self._own.progress)
                stream.write(file.header)

                def append(at: int, view: memoryview) -> None:
                    assert at == stream.position, "the plan has all tensors of the file, in their order"
                    stream.write(view)

                yield append

    def _write_tensor(self, put: Put, tensor: OwnedTensor, path: str) -> bytes:
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        nbytes = math.prod(tensor.shape) * dtype.itemsize
        sums, at = RangeSums(nbytes, 0, nbytes - 1), 0
        is_mine = any(chunk.rank == self._rank for chunk in tensor.chunks)
        values = self._own.values(tensor.key) if is_mine else None
        for slab in slabs(tensor.shape, dtype.itemsize):
            filled = self._fill(slab, tensor, dtype, values, path)
            sums.add(at, filled)
            put(tensor.begin + at, filled)
            at += len(filled)
        return sums.sums.tobytes()

    def _fill(
        self, slab: Box, tensor: OwnedTensor, dtype: torch.dtype, values: ChunkValues | None, path: str
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
        checksum = memoryview(bytearray(CRC.size))
        self._incoming[sender].send_to_all(checksum, sender)
        self._incoming[sender].send_to_all(memory, sender)
        if CRC.unpack(checksum)[0] != crc32(memory):
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
    *others, last = inside(box, outer) or (slice(0, 1),)
    return *others, slice(last.start * dtype.itemsize, last.stop * dtype.itemsize)
