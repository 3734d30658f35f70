"""Owns reading boxes of stored tensors into memory of the caller, whatever wrote them, without torch."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from holdfast._byte_ranges import ByteRange, ranges_of
from holdfast._contents.inventory import Ints, TensorEntry
from holdfast._contents.item_bytes import ItemBytes, ItemFile, ItemRules, naming, read_transformed
from holdfast._format.dtypes import DTYPES
from holdfast._format.item_table import StorageInfo
from holdfast._format.torch_item_reader import TensorLayout, read_item_layout
from holdfast._geometry import Box, cover_of, intersect, is_row_major, reach_of, row_major_strides, volume
from holdfast._io.blocks import BLOCK_SIZE, crc32
from holdfast.errors import ChecksumError, IncompleteCheckpointError, IntegrityError, MetadataFormatError

_PIECE = 16 << 20
"""A large run is read in pieces of this, so that several threads share it."""


class Arrays(Protocol):
    """How tensors are held in memory: as arrays of numpy, or as tensors of torch."""

    def empty(self, shape: Ints, dtype: str) -> Any:
        """Memory for a tensor, row-major, with anything in it."""

    def memory_of(self, array: Any) -> memoryview:
        """The bytes of what ``empty`` made."""

    def put(self, array: Any, box: Box, content: memoryview, strides: Ints, first: int) -> None:
        """Fill a box of an array with elements from bytes: from element ``first`` on, ``strides`` apart."""

    def put_loaded(self, array: Any, box: Box, content: bytes, at: Ints) -> None:
        """Fill a box of an array with that of the tensor in a container of torch's, from ``at`` on.

        Raises:
            IntegrityError: There is no such tensor in it.
            UsageError: These arrays cannot do that.
        """


class ChunkPart(NamedTuple):
    """A box of one stored chunk, and where it goes.

    Attributes:
        key: The tensor's key.
        dtype: Its dtype.
        shape: The shape of the chunk.
        info: Where the chunk lies.
        box: The box, in the chunk.
        at: Where it begins in the array.
        array: What is filled, made by ``arrays``.
        array_shape: Its shape.
        arrays: Knows the array.
    """

    key: str
    dtype: str
    shape: Ints
    info: StorageInfo
    box: Box
    at: Ints
    array: Any
    array_shape: Ints
    arrays: Arrays

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole chunk."""
        return volume(self.shape) * self.itemsize

    def jobs(self, rules: ItemRules, file: ItemFile) -> list[Callable[[], None]]:
        """What reads it, all of it or piece by piece."""
        item = ItemBytes(rules, file, self.info)
        if self.info.transform_descriptors:
            return [partial(self._run, self._read_transformed, item)]
        if not self.info.is_located:
            return [partial(self._run, self._read_torch_written, item)]
        if self.info.payload_nbytes != self.nbytes:
            what = f"has {self.info.payload_nbytes} bytes, and its tensor needs {self.nbytes}"
            raise item.damaged(what, MetadataFormatError, key=self.key)
        block = self.info.block_size if item.is_verified else 0
        pieces = self._ranges(rules, _PIECE, block)
        return [partial(self._run, self._read_piece, item, piece) for piece in pieces]

    def _ranges(self, rules: ItemRules, run_limit: int, block: int) -> Iterator[ByteRange]:
        return ranges_of(
            self.shape, *self.box, self.itemsize, run_limit=run_limit, block=block, thrift=rules.thrift
        )

    def _run(self, read: Callable[..., object], *what: Any) -> None:
        with naming(self.key):
            read(*what)

    def _read_piece(self, item: ItemBytes, piece: ByteRange) -> memoryview:
        """Read a piece and put it where it belongs; the bytes that were read."""
        item.context.cancellation.check()
        at = tuple(a + o for a, o in zip(self.at, piece.offsets, strict=True))
        content = self._own_memory(at, piece) if piece.is_run else None
        if content is not None:
            item.read(piece.start, content)
            return content
        content = memoryview(bytearray(piece.nbytes))
        item.read(piece.start, content)
        self.arrays.put(self.array, Box(at, piece.lengths), content, row_major_strides(self.shape), 0)
        return content

    def _own_memory(self, at: Ints, piece: ByteRange) -> memoryview | None:
        """The array's bytes for a run of the chunk, if they are one run there, too."""
        strides = row_major_strides(self.array_shape)
        if reach_of(piece.lengths, strides) != volume(piece.lengths):
            return None
        start = sum(o * s for o, s in zip(at, strides, strict=True)) * self.itemsize
        return self.arrays.memory_of(self.array)[start : start + piece.nbytes]

    def _read_transformed(self, item: ItemBytes) -> None:
        # Inside is a container, which is little more than the elements.
        content = read_transformed(item, limit=self.nbytes + (1 << 20))
        layout = read_item_layout(
            lambda offset, nbytes: content[offset : offset + nbytes],
            len(content),
            path=item.file.path,
            key=self.key,
        )
        if layout is None or not self._is_known(layout):
            self.arrays.put_loaded(self.array, Box(self.at, self.box.lengths), content, self.box.offsets)
            return
        end = layout.payload_offset + layout.payload_nbytes
        self._put_payload(item, memoryview(content)[layout.payload_offset : end], layout)

    def _read_torch_written(self, item: ItemBytes) -> None:
        info = self.info
        layout = read_item_layout(item.read_at, info.length, path=item.file.path, key=self.key)
        if layout is None or not self._is_known(layout):
            content = item.read_unchecked()
            self.arrays.put_loaded(self.array, Box(self.at, self.box.lengths), content, self.box.offsets)
            return
        if not is_row_major(layout.shape, layout.strides):
            payload = memoryview(bytearray(layout.payload_nbytes))
            item.file.read_into(info.offset + layout.payload_offset, payload)
            self._put_payload(item, payload, layout)
            return
        start = layout.payload_offset + layout.storage_offset * self.itemsize
        inner = ItemBytes(
            item.context, item.file, StorageInfo(info.relative_path, info.offset, info.length, None, start)
        )
        # Part of a payload cannot be checked: torch keeps one checksum for the whole.
        is_whole = self.box.lengths == self.shape and self.nbytes == layout.payload_nbytes
        found = 0
        for piece in self._ranges(item.context, BLOCK_SIZE if is_whole else _PIECE, 0):
            read = self._read_piece(inner, piece)
            found = crc32(read, found) if is_whole else 0
        if is_whole:
            self._check(item, layout, found)

    def _is_known(self, layout: TensorLayout) -> bool:
        """Whether the elements are those of the metadata, and can be taken as they are."""
        if (layout.dtype, layout.shape) != (self.dtype, self.shape):
            raise IntegrityError(
                f"it holds a {layout.dtype} tensor of shape {list(layout.shape)}, and the metadata says "
                f"{self.dtype} {list(self.shape)}: the file belongs to another checkpoint",
                key=self.key,
            )
        return layout.byteorder == "little" and not layout.conj and not layout.neg

    def _put_payload(self, item: ItemBytes, payload: memoryview, layout: TensorLayout) -> None:
        self._check(item, layout, crc32(payload))
        offsets = zip(self.box.offsets, layout.strides, strict=True)
        first = layout.storage_offset + sum(offset * stride for offset, stride in offsets)
        self.arrays.put(self.array, Box(self.at, self.box.lengths), payload, layout.strides, first)

    def _check(self, item: ItemBytes, layout: TensorLayout, found: int) -> None:
        if item.context.verify and layout.crc32 is not None and found != layout.crc32:
            what = "has other bytes of its tensor than were written"
            raise item.damaged(what, ChecksumError, expected=layout.crc32, found=found)


def find_parts(
    entry: TensorEntry, box: Box, arrays: Arrays, array: Any, *, at: Ints, shape: Ints
) -> list[ChunkPart]:
    """The parts of stored chunks that make up a box of a tensor.

    Args:
        entry: The tensor.
        box: What is wanted of it.
        arrays: Knows the array.
        array: What is filled.
        at: Where the box begins in the array.
        shape: The shape of the array.

    Raises:
        IncompleteCheckpointError: No file has all of it.
    """
    parts: list[ChunkPart] = []
    for chunk in entry.chunks:
        found = intersect(Box(chunk.offsets, chunk.lengths), box)
        if found is None:
            continue
        if chunk.item is None:
            raise _incomplete(entry.key, f"its chunk at {list(chunk.offsets)} is stored nowhere")
        inside = Box(_minus(found.offsets, chunk.offsets), found.lengths)
        where = tuple(a + o - b for a, o, b in zip(at, found.offsets, box.offsets, strict=True))
        parts.append(
            ChunkPart(entry.key, entry.dtype, chunk.lengths, chunk.item, inside, where, array, shape, arrays)
        )
    wanted = volume(box.lengths)
    if wanted and not (len(parts) == 1 and volume(parts[0].box.lengths) == wanted):
        covered = [Box(_minus(part.at, at), part.box.lengths) for part in parts]
        hole = cover_of(box.lengths, covered)
        if hole is not None:
            offsets = [a + b for a, b in zip(hole.offsets, box.offsets, strict=True)]
            raise _incomplete(entry.key, f"no chunk has {list(hole.lengths)} elements from {offsets} on")
    return parts


def _minus(one: Sequence[int], other: Sequence[int]) -> Ints:
    return tuple(a - b for a, b in zip(one, other, strict=True))


def _incomplete(key: str, problem: str) -> IncompleteCheckpointError:
    return IncompleteCheckpointError(
        f"{key}: {problem}: the save was not complete. Load another checkpoint.", key=key
    )
