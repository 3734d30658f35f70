"""Small tensors that lie side by side, read together: one request for thousands of them."""

from collections.abc import Callable, Iterator

import torch

from holdfast._io.blocks import crc32
from holdfast._storage.open_files import SharedFile
from holdfast._storage.source import Chunk, ReadContext
from holdfast._tensors.host import is_plain_memory, memory_of
from holdfast.errors import ChecksumError
from holdfast.planner import ReadItem

__all__ = ["GAP", "PACK", "SMALL", "damaged", "is_small", "pack_jobs"]

SMALL = 128 * 1024
"""What is smaller is read together with its neighbours."""
GAP = 64 * 1024
"""What lies between two neighbours and is read for nothing, at most."""
PACK = 4 * 1024 * 1024
"""What is read in one request, at most."""


def is_small(chunk: Chunk, item: ReadItem) -> bool:
    """Whether an item is read with its neighbours: raw, at most one block, and wanted whole."""
    place = chunk.place
    return (
        0 <= place.payload_nbytes < SMALL and not place.transform_descriptors and item.lengths == chunk.shape
    )


def pack_jobs(
    context: ReadContext, file: SharedFile, wanted: list[tuple[Chunk, ReadItem]]
) -> list[Callable[[], None]]:
    """Jobs that read small items of one file; neighbours together."""
    return [_Pack(context, file, pack) for pack in _packs(wanted)]


def _packs(wanted: list[tuple[Chunk, ReadItem]]) -> Iterator[list[tuple[Chunk, ReadItem]]]:
    pack: list[tuple[Chunk, ReadItem]] = []
    begin = end = 0
    for chunk, item in sorted(wanted, key=lambda pair: pair[0].place.offset):
        place = chunk.place
        start = place.offset + place.payload_offset
        stop = start + place.payload_nbytes
        if pack and (start - end > GAP or stop - begin > PACK):
            yield pack
            pack = []
        if not pack:
            begin = start
        pack.append((chunk, item))
        end = max(stop, end)
    if pack:
        yield pack


class _Pack:
    """Items whose payloads are read in one request."""

    def __init__(self, context: ReadContext, file: SharedFile, pack: list[tuple[Chunk, ReadItem]]) -> None:
        self.context = context
        self.file = file
        self.pack = pack

    def __call__(self) -> None:
        first, last = self.pack[0][0].place, self.pack[-1][0].place
        begin = first.offset + first.payload_offset
        nbytes = last.offset + last.payload_offset + last.payload_nbytes - begin
        with self.context.budget.hold(nbytes):
            content = bytearray(nbytes)
            self.file.reader().read_into(begin, content)
            view = memoryview(content)
            planner, counter = self.context.counter.planner, self.context.counter
            with counter.lock:
                for chunk, item in self.pack:
                    place = chunk.place
                    start = place.offset + place.payload_offset - begin
                    payload = view[start : start + place.payload_nbytes]
                    if self.context.verify and place.checksums and crc32(payload) != _stored(place.checksums):
                        at = place.offset + place.payload_offset
                        raise damaged(item.dest_index.fqn, self.file.path, at, place.payload_nbytes)
                    target = planner.resolve_tensor(item)
                    counter.touched.append(item.dest_index.fqn)
                    _put(target, payload, chunk)
                    planner.commit_tensor(item, target)


def damaged(key: str, path: str, offset: int, nbytes: int) -> ChecksumError:
    """The error for a payload whose checksum is wrong."""
    return ChecksumError(
        f"{key}: {path}: the {nbytes} bytes at {offset} are not the ones that "
        "were written. Restore the file, or load another checkpoint.",
        key=key,
        path=path,
    )


def _stored(checksums: bytes) -> int:
    return int.from_bytes(checksums, "little")


def _put(target: torch.Tensor, payload: memoryview, chunk: Chunk) -> None:
    target = target.detach()
    if target.dtype == chunk.dtype and is_plain_memory(target):
        memory_of(target)[:] = payload
    elif target.numel():
        target.copy_(torch.frombuffer(payload, dtype=chunk.dtype).view(chunk.shape))
