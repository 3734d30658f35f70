"""Owns the way of tensors from a source to a target: in pieces, cast, and with a checksum of each piece."""

import io
from collections.abc import Iterator
from typing import NamedTuple

import torch

from holdfast._conversion.selection import Entry, Selection
from holdfast._conversion.sources import Source
from holdfast._geometry import Box, row_major_boxes, volume
from holdfast._io.blocks import crc32
from holdfast._io.progress import STRIDE, ProgressTracker
from holdfast._tensors.host import memory_of
from holdfast.errors import IntegrityError

PIECE = 16 << 20
"""The most bytes of a tensor that are read before they are written."""

LARGE_PIECE = 192 << 20
"""The same for compressed items, which are read from their beginning each time, and for items of torch, which
can be checked only as a whole."""


_MOST_AHEAD = 4096
_SMALL = 1 << 20


class SentPiece(NamedTuple):
    """A piece that was given to the writer, and its CRC-32. What is not a tensor has no box."""

    name: str
    box: Box | None
    crc32: int


class EntryStream:
    """Reads what is taken of a source, and keeps account of it.

    Attributes:
        sent: What was read and given away.
    """

    def __init__(self, source: Source, selection: Selection) -> None:
        self.source = source
        self.selection = selection
        self.sent: list[SentPiece] = []
        self._order = list(selection.entries.values())
        self._position = {entry.name: number for number, entry in enumerate(self._order)}
        self._ahead: dict[str, torch.Tensor] = {}

    def read(self, entry: Entry, box: Box) -> torch.Tensor:
        """A piece of a tensor, as the target gets it."""
        assert entry.dtype is not None
        if _is_small(entry, box):
            if entry.name not in self._ahead:
                self._read_ahead(self._position[entry.name])
            piece = self._ahead.pop(entry.name)
        else:
            (piece,) = self.source.read_boxes([(entry.key, box)])
        piece = piece.to(entry.dtype)
        self.sent.append(SentPiece(entry.name, box, crc32(memory_of(piece))))
        return piece

    def _read_ahead(self, position: int) -> None:
        """Read small tensors from a position on, together, so that not each of them is a request."""
        taken, nbytes = list[Entry](), 0
        for entry in self._order[position : position + _MOST_AHEAD]:
            if entry.dtype is None or not _is_small(entry, entry.box):
                continue
            taken.append(entry)
            nbytes += entry.nbytes
            if nbytes >= PIECE:
                break
        # What is left of the last time was asked for in another order, and is read again.
        tensors = self.source.read_boxes([(entry.key, entry.box) for entry in taken])
        self._ahead = {entry.name: tensor for entry, tensor in zip(taken, tensors, strict=True)}

    def pieces(self, entry: Entry, box: Box) -> Iterator[torch.Tensor]:
        """A box of a tensor, in row-major order."""
        for part in self.parts(entry, box):
            yield self.read(entry, part)

    def parts(self, entry: Entry, box: Box) -> Iterator[Box]:
        """The boxes in which a box of a tensor is read, in row-major order."""
        stored = self.source.tensor(entry.key)
        assert stored is not None
        assert entry.dtype is not None
        if not volume(box.lengths):
            return iter([box])
        item = self.source.first_item(entry.key)
        limit = PIECE if item.is_raw else LARGE_PIECE
        itemsize = max(stored.properties.dtype.itemsize, entry.dtype.itemsize)
        return row_major_boxes(box, itemsize, limit)

    def read_object(self, entry: Entry) -> io.BytesIO:
        """A value that is not a tensor, as it is stored, container included."""
        content = self.source.read_object(entry.key).getvalue()
        self.sent.append(SentPiece(entry.name, None, crc32(content)))
        return io.BytesIO(content)

    def boxes(self, entry: Entry) -> Iterator[Box]:
        """The chunks that the source has of a tensor."""
        stored = self.source.tensor(entry.key)
        assert stored is not None
        for chunk in stored.chunks:
            yield Box(tuple(chunk.offsets), tuple(chunk.sizes))

    def check(self, target: Source, progress: ProgressTracker) -> None:
        """Read all that was sent out of the target, and compare.

        Raises:
            IntegrityError: Something is missing, or is not what was sent.
        """
        wanted = {entry.name for entry in self.selection.tensors()}
        missing = wanted - target.metadata.state_dict_metadata.keys()
        if missing:
            raise _not_the_same(target, min(missing), "is missing")
        progress.begin(self.selection.nbytes)
        for batch in self._batches():
            boxes = [(piece.name, piece.box) for piece in batch if piece.box is not None]
            tensors = iter(target.read_boxes(boxes))
            for piece in batch:
                if piece.box is None:
                    found, nbytes = crc32(target.read_object(piece.name).getvalue()), 0
                else:
                    elements = next(tensors)
                    found, nbytes = crc32(memory_of(elements)), elements.nbytes
                if found != piece.crc32:
                    raise _not_the_same(target, piece.name, "has other bytes than were sent")
                for at in range(0, nbytes, STRIDE):
                    progress.advance(min(STRIDE, nbytes - at))

    def _batches(self) -> Iterator[list[SentPiece]]:
        """The sent pieces in groups that are read together."""
        batch, nbytes = list[SentPiece](), 0
        for piece in self.sent:
            dtype = self.selection.entries[piece.name].dtype
            size = 0 if piece.box is None or dtype is None else volume(piece.box.lengths) * dtype.itemsize
            if batch and (nbytes + size > PIECE or len(batch) >= _MOST_AHEAD):
                yield batch
                batch, nbytes = [], 0
            batch.append(piece)
            nbytes += size
        yield batch


def _is_small(entry: Entry, box: Box) -> bool:
    """Whether a tensor is read together with its neighbours."""
    return box.lengths == entry.shape and entry.nbytes < _SMALL


def _not_the_same(target: Source, key: str, what: str) -> IntegrityError:
    return IntegrityError(
        f"{target.url}: {key}: {what}: the target is not what was converted. Do not use it; convert again.",
        key=key,
        path=target.url,
    )
