"""Owns which jobs read a box of a stored chunk: by ranges, through its transforms, or as torch wrote it."""

from collections.abc import Callable
from functools import partial
from operator import sub
from typing import Any

from holdfast._byte_ranges import SCRATCH, ranges_of
from holdfast._contents.box_target import BoxTarget, StoredBox
from holdfast._contents.item_bytes import ItemBytes, naming, new_memory, read_transformed, undo_transforms
from holdfast._contents.ranges import RangeRead, ranges_for
from holdfast._format.item_table import StorageInfo
from holdfast._format.torch_item import tensor_item
from holdfast._format.torch_item_reader import TensorLayout, read_item_layout
from holdfast._geometry import Box, intersect, row_major_boxes, volume
from holdfast._io.blocks import BLOCK_SIZE, crc32
from holdfast.errors import ChecksumError, IntegrityError, MetadataFormatError

_STEP = 1 << 20
_ROWS = 4 << 20


class RangeJob:
    """The job that reads one range. It may be done by itself, or with its neighbours."""

    def __init__(self, read: RangeRead) -> None:
        self.read = read

    def __call__(self) -> None:
        """Read it, and put it where it belongs."""
        self._carry_out(self.read.deliver)

    def take(self, content: memoryview) -> None:
        """The same with bytes that were read and checked already."""
        self._carry_out(partial(self.read.deliver_from, content))

    def _carry_out(self, work: Callable[[], object]) -> None:
        _carry_out(self.read.stored.target, work)


def box_jobs(item: ItemBytes, stored: StoredBox) -> list[Callable[[], None]]:
    """Jobs that together read one box of a stored chunk.

    Raises:
        MetadataFormatError: What is stored is not as large as the chunk that is described.
    """
    target = stored.target
    if item.info.is_raw and item.info.payload_nbytes != stored.nbytes:
        found = item.info.payload_nbytes
        what = f"has {found} bytes, and its tensor needs {stored.nbytes}"
        with naming(target.key):
            raise item.damaged(what, MetadataFormatError, expected=stored.nbytes, found=found)
    if item.info.transform_descriptors:
        return [partial(_carry_out, target, partial(_read_transformed, item, stored))]
    if not item.info.is_located:
        return [partial(_carry_out, target, partial(_read_torch_written, item, stored))]
    jobs = [RangeJob(RangeRead(item, stored, piece)) for piece in ranges_for(item, stored)]
    target.waiting = max(1, len(jobs))
    return [*jobs] if jobs else [target.arrived]


def _carry_out(target: BoxTarget, work: Callable[[], object]) -> None:
    with naming(target.key):
        work()
        target.arrived()


def _read_torch_written(item: ItemBytes, stored: StoredBox) -> None:
    """Read the box of an item that torch wrote; only its bytes, where the elements lie one by one."""
    layout = _layout_of(item, stored, item.read_at, item.info.length)
    if layout is None:
        _put_loaded(item, stored, item.read_unchecked())
        return
    start = layout.payload_offset + layout.storage_offset * stored.itemsize
    info = StorageInfo(item.info.relative_path, item.info.offset, item.info.length, None, start)
    inner = ItemBytes(item.context, item.file, info)
    stored = stored._replace(info=info, strides=layout.strides)
    # Part of a payload cannot be checked: torch keeps one checksum for the whole.
    is_whole = stored.box.lengths == stored.shape and stored.nbytes == layout.payload_nbytes
    # What is checked is still in cache then.
    limit, found, end = BLOCK_SIZE if is_whole else SCRATCH, 0, 0
    for piece in ranges_of(stored.strides, *stored.box, stored.itemsize, run_limit=limit, block=0):
        item.context.cancellation.check()
        found = RangeRead(inner, stored, piece).deliver(found if is_whole else None)
        is_whole, end = is_whole and piece.start == end, piece.start + piece.nbytes
    if is_whole and end == layout.payload_nbytes:
        _check(item, layout, found)


def _read_transformed(item: ItemBytes, stored: StoredBox) -> None:
    """Read a chunk from its beginning, a few rows at a time, and keep of it what the box needs."""
    if not item.info.is_located:
        # Inside is a container of torch's, which is little more than the elements.
        content = read_transformed(item, limit=stored.nbytes + _STEP)
        layout = _layout_of(item, stored, lambda at, nbytes: content[at : at + nbytes], len(content))
        if layout is None:
            _put_loaded(item, stored, content)
        else:
            end = layout.payload_offset + layout.payload_nbytes
            _put_payload(item, stored, layout, memoryview(content)[layout.payload_offset : end])
        return
    stream = undo_transforms(item)
    frame = tensor_item(stored.dtype, stored.shape)
    _fill(item, stream, memoryview(bytearray(frame.payload_offset(0))))
    memory = stored.target.memory() if stored.box.lengths == stored.shape else None
    if memory is not None:
        stored.target.touch()
        checksum = _fill(item, stream, memory)
    else:
        checksum = _put_rows(item, stream, stored)
    tail = frame.tail(0, checksum)
    if _read_rest(stream, len(tail) + 1) != tail:
        raise item.damaged("is not what was saved, once its transforms are undone", ChecksumError)


def _put_rows(item: ItemBytes, stream: Any, stored: StoredBox) -> int:
    """Keep what the box needs of each group of rows; the checksum of all of them."""
    whole = Box((0,) * len(stored.shape), stored.shape)
    groups = list(row_major_boxes(whole, stored.itemsize, _ROWS))
    largest, checksum = volume(groups[0].lengths) * stored.itemsize, 0
    with item.context.budget.hold(largest):
        # Taken once: memory that is freed and taken again for each group stays with the thread's heap.
        scratch = new_memory(largest)
        for group in groups:
            rows = scratch[: volume(group.lengths) * stored.itemsize]
            checksum = _fill(item, stream, rows, checksum)
            both = intersect(group, stored.box)
            if both is not None:
                at = tuple(map(sub, both.offsets, stored.box.offsets))
                inside = map(sub, both.offsets, group.offsets)
                first = sum(o * s for o, s in zip(inside, stored.strides, strict=True))
                stored.target.put(at, both.lengths, rows, stored.strides, first)
    return checksum


def _fill(item: ItemBytes, stream: Any, view: memoryview, checksum: int = 0) -> int:
    """Fill ``view`` from the stream, and continue the checksum while the bytes are in cache."""
    done = 0
    while done < len(view):
        count = stream.readinto(view[done : done + _STEP])
        if not count:
            raise item.damaged("ends before its tensor does, once its transforms are undone")
        checksum = crc32(view[done : done + count], checksum)
        done += count
    return checksum


def _read_rest(stream: Any, most: int) -> bytes:
    rest = b""
    while len(rest) < most and (piece := stream.read(most - len(rest))):
        rest += piece
    return rest


def _layout_of(
    item: ItemBytes, stored: StoredBox, read_at: Callable[[int, int], bytes], nbytes: int
) -> TensorLayout | None:
    """Where the elements lie in a container of torch's; None if only torch can take them as they are.

    Raises:
        IntegrityError: They are not those of the metadata.
    """
    layout = read_item_layout(read_at, nbytes, path=item.file.path, key=stored.target.key)
    if layout is None:
        return None
    found, expected = (layout.shape, layout.dtype), (stored.shape, stored.dtype)
    if found != expected:
        what = (
            f"holds a {layout.dtype} tensor of shape {list(layout.shape)}, and the metadata says "
            f"{stored.dtype} {list(stored.shape)}: the file belongs to another checkpoint"
        )
        raise item.damaged(what, expected=expected, found=found)
    return layout if layout.byteorder == "little" and not layout.conj and not layout.neg else None


def _put_payload(item: ItemBytes, stored: StoredBox, layout: TensorLayout, payload: memoryview) -> None:
    _check(item, layout, crc32(payload))
    offsets, lengths = stored.box
    first = layout.storage_offset + sum(o * s for o, s in zip(offsets, layout.strides, strict=True))
    if 0 not in lengths:
        stored.target.put((0,) * len(lengths), lengths, payload, layout.strides, first)


def _check(item: ItemBytes, layout: TensorLayout, found: int) -> None:
    if item.context.verify and layout.crc32 is not None and found != layout.crc32:
        place = item.info.offset + layout.payload_offset
        what = f"has at {place} other bytes of its tensor than were written"
        raise item.damaged(what, ChecksumError, expected=layout.crc32, found=found)


def _put_loaded(item: ItemBytes, stored: StoredBox, content: bytes) -> None:
    try:
        stored.target.put_loaded(content, stored.shape, stored.box.offsets)
    except IntegrityError as error:
        raise item.damaged(str(error), expected=error.expected, found=error.found) from error
