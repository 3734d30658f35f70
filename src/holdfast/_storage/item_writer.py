"""Items into a file: containers around raw bytes, checksummed on the way, small ones packed together."""

import ctypes
import io
import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from holdfast._format.torch_item import SMALL_ALIGNMENT, ItemFrame
from holdfast._io.blocks import BLOCK_SIZE, BlockSums, combine_blocks, crc32
from holdfast._io.store import FileWriter
from holdfast._objects import StoredObject
from holdfast._plan.write_columns import WriteColumns
from holdfast._storage.results import Notes
from holdfast._storage.stamps import Stamp, frame_of, stamp_of
from holdfast._tensors.host import copy_of, host_pieces
from holdfast.errors import IncompleteWriteError
from holdfast.extension import StreamTransformExtension

__all__ = ["PACK", "SMALL", "ItemWriter"]

# Below this an item is assembled in memory with its neighbours: three calls to the file for each of
# 100,000 tensors of 16 bytes would take longer than everything else together.
SMALL = 128 * 1024
# Memory of this size is reused from one pack to the next. Packs of megabytes are given back to the system
# each time, and their pages cost more than all else that is done for a tensor of 4 KiB.
PACK = 256 * 1024


class ItemWriter:
    """Writes items one after the other into one new file, and notes where each of them lies.

    Args:
        file: Where to.
        file_number: Its number among the files of this rank.
        lines: The plan that the items are lines of.
        transforms: What each item's container goes through; the first one stands next to the file.
        copy_at_once: How many bytes of a tensor are copied at a time, if it must be copied.
    """

    def __init__(
        self,
        file: FileWriter,
        file_number: int,
        lines: WriteColumns,
        transforms: Sequence[StreamTransformExtension] = (),
        *,
        copy_at_once: int,
    ) -> None:
        self.file = file
        self.lines = lines
        self.transforms = transforms
        self.copy_at_once = copy_at_once
        self.file_number = file_number
        self.notes = Notes()
        self._packed: list[Any] = []
        self._packed_nbytes = 0
        self._stamps: dict[int, Stamp] = {}

    def add(self, number: int, data: torch.Tensor | io.BytesIO) -> None:
        """Write one line's item. The data may be changed as soon as this returns."""
        if isinstance(data, torch.Tensor):
            _check_planned(self.lines, number, data)
            item = frame_of(data.dtype, data.shape)
        elif isinstance(data, StoredObject):
            item = data.item
        else:
            self._add_stream(number, data)
            return
        if self.transforms:
            self._add_transformed(number, item, data)
        elif item.payload_nbytes < SMALL:
            self._add_small(number, item, data)
        else:
            self._add_large(number, item, data)

    def add_small_tensors(self, numbers: Sequence[int], tensors: Mapping[str, Any]) -> None:
        """The same for many small whole tensors at once, found by their keys; no transforms.

        All items of a form begin equally far from an aligned place, so that only payload and checksums
        differ between them: 2 microseconds an item.
        """
        self._align()
        lines, packed, notes, stamps = self.lines, self._packed, self.notes, self._stamps
        begin, totals = self.file.position + self._packed_nbytes, list[int]()
        keys, forms, read, crc = lines.keys, lines.form, ctypes.string_at, crc32
        for number in numbers:
            form, key = forms[number], keys[number]
            stamp = stamps.get(form) or self._make_stamp(form)
            tensor = tensors[key]
            if tensor.shape != stamp.shape or tensor.dtype is not stamp.dtype:
                _check_planned(lines, number, tensor)
            if (
                tensor.is_cpu
                and tensor.is_contiguous()
                and not tensor.is_neg()
                and not (stamp.is_complex and tensor.is_conj())
            ):
                payload = read(tensor.data_ptr(), stamp.nbytes)
            else:
                payload = copy_of(tensor)
            checksum = crc(payload)
            sum_bytes = checksum.to_bytes(4, "little")
            tail = sum_bytes.join(stamp.tail)
            packed += (stamp.head, payload, tail, stamp.gap)
            totals.append(stamp.total)
            notes.wrap.append(crc(tail, stamp.head_sum))
            if payload:
                notes.checksums += sum_bytes
        # A file ends with its last item.
        last_gap = packed.pop()
        self._note_run(numbers, begin, totals)
        self._packed_nbytes += sum(totals) - len(last_gap)
        if self._packed_nbytes >= PACK:
            self._flush()

    def _align(self) -> None:
        filling = -(self.file.position + self._packed_nbytes) % SMALL_ALIGNMENT
        if filling:
            self._packed.append(bytes(filling))
            self._packed_nbytes += filling

    def _make_stamp(self, form: int) -> "Stamp":
        made = self._stamps[form] = stamp_of(self.lines.forms[form])
        return made

    def _note_run(self, numbers: Sequence[int], begin: int, totals: list[int]) -> None:
        lines, notes, stamps = self.lines, self.notes, self._stamps
        used = [stamps[lines.form[number]] for number in numbers]
        nbytes = [stamp.item_nbytes for stamp in used]
        notes.keys += [lines.keys[number] for number in numbers]
        notes.offset += [lines.offset[number] for number in numbers]
        notes.hint += [lines.hints[number] for number in numbers]
        notes.file += [self.file_number] * len(numbers)
        notes.start += list(itertools.accumulate(totals[:-1], initial=begin))
        notes.nbytes += nbytes
        notes.raw_nbytes += nbytes
        notes.payload_start += [len(stamp.head) for stamp in used]
        notes.payload_nbytes += [stamp.nbytes for stamp in used]
        notes.blocks += [1 if stamp.nbytes else 0 for stamp in used]

    def finish(self) -> Notes:
        """Make everything durable, and return where each item lies."""
        self._flush()
        self.file.finish()
        return self.notes

    def _flush(self) -> None:
        if self._packed:
            packed, self._packed, self._packed_nbytes = b"".join(self._packed), [], 0
            self.file.write(packed)

    def _add_small(self, number: int, item: ItemFrame, data: torch.Tensor | StoredObject) -> None:
        position = self.file.position + self._packed_nbytes
        # Copied at once, so that the caller may change it.
        payload = copy_of(data) if isinstance(data, torch.Tensor) else bytes(data.payload)
        checksum = crc32(payload)
        head, tail = item.head(position), item.tail(position, checksum)
        self._packed += (head, payload, tail)
        nbytes = len(head) + len(payload) + len(tail)
        self._packed_nbytes += nbytes
        checksums = checksum.to_bytes(4, "little") if payload else b""
        wrap = crc32(tail, crc32(head))
        self._note(number, position, nbytes, len(head), len(payload), nbytes, checksums, wrap)
        if self._packed_nbytes >= PACK:
            self._flush()

    def _add_large(self, number: int, item: ItemFrame, data: torch.Tensor | StoredObject) -> None:
        self._flush()
        position = self.file.position
        head = item.head(position)
        self.file.write(head)
        sums = BlockSums(BLOCK_SIZE)
        for piece in self._pieces(data):
            self.file.write(piece, sums)
        blocks = sums.finish()
        tail = item.tail(position, combine_blocks(blocks, item.payload_nbytes))
        self.file.write(tail)
        nbytes = self.file.position - position
        wrap = crc32(tail, crc32(head))
        self._note(number, position, nbytes, len(head), item.payload_nbytes, nbytes, _little(blocks), wrap)

    def _add_stream(self, number: int, data: io.BytesIO) -> None:
        """An item in a container that somebody else made."""
        if self.transforms:
            self._add_transformed(number, None, data)
            return
        self._flush()
        position = self.file.position
        sums = BlockSums(BLOCK_SIZE)
        with data.getbuffer() as content:
            self.file.write(content, sums)
        nbytes = self.file.position - position
        self._note(number, position, nbytes, 0, nbytes, nbytes, _little(sums.finish()), 0)

    def _add_transformed(self, number: int, item: ItemFrame | None, data: torch.Tensor | io.BytesIO) -> None:
        self._flush()
        position = self.file.position
        sink = _Sink(self.file)
        stream: Any = sink
        for transform in self.transforms:
            stream = transform.transform_to(stream)
        if item is None:
            assert isinstance(data, io.BytesIO)
            with data.getbuffer() as content:
                raw_nbytes = _write_all(stream, content)
        else:
            assert isinstance(data, torch.Tensor | StoredObject)
            raw_nbytes = _write_all(stream, item.head(0))
            checksum = 0
            for piece in self._pieces(data):
                for start in range(0, len(piece), BLOCK_SIZE):
                    part = piece[start : start + BLOCK_SIZE]
                    checksum = crc32(part, checksum)
                    raw_nbytes += _write_all(stream, part)
            raw_nbytes += _write_all(stream, item.tail(0, checksum))
        stream.close()
        nbytes = self.file.position - position
        checksums = _little(sink.sums.finish())
        self._note(number, position, nbytes, 0, nbytes, raw_nbytes, checksums, 0)

    def _pieces(self, data: torch.Tensor | StoredObject) -> Iterable[memoryview]:
        if isinstance(data, StoredObject):
            return (data.payload,)
        return host_pieces(data, self.copy_at_once)

    def _note(
        self,
        number: int,
        position: int,
        nbytes: int,
        payload_start: int,
        payload_nbytes: int,
        raw_nbytes: int,
        checksums: bytes,
        wrap: int,
    ) -> None:
        lines, notes = self.lines, self.notes
        notes.keys.append(lines.keys[number])
        notes.offset.append(lines.offset[number])
        notes.hint.append(lines.hints[number])
        notes.file.append(self.file_number)
        notes.start.append(position)
        notes.nbytes.append(nbytes)
        notes.payload_start.append(payload_start)
        notes.payload_nbytes.append(payload_nbytes)
        notes.raw_nbytes.append(raw_nbytes)
        notes.wrap.append(wrap)
        notes.blocks.append(len(checksums) // 4)
        notes.checksums += checksums


def _check_planned(lines: WriteColumns, number: int, data: torch.Tensor) -> None:
    form = lines.forms[lines.form[number]] if lines.form[number] >= 0 else None
    if form is None or data.shape != form.lengths or data.dtype != form.properties[0]:
        key = lines.keys[number]
        expected = None if form is None else (tuple(form.lengths), form.properties[0])
        raise IncompleteWriteError(
            f"{key}: planned {expected}, but the planner gave a tensor of shape "
            f"{tuple(data.shape)} and {data.dtype}. create_local_plan and resolve_data must agree.",
            key=key,
            expected=expected,
            found=(tuple(data.shape), data.dtype),
        )


def _little(blocks: "array[int]") -> bytes:
    if array("H", [1]).tobytes() == b"\0\1":
        blocks = array("I", blocks)
        blocks.byteswap()
    return blocks.tobytes()


def _write_all(stream: Any, data: Any) -> int:
    """Write all of ``data``, whatever portions the stream takes."""
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    done = 0
    while done < len(view):
        done += stream.write(view[done:]) or 0
    return len(view)


class _Sink(io.RawIOBase):
    """The file's end of a stack of transforms: checksums what arrives, and leaves the file open."""

    def __init__(self, file: FileWriter) -> None:
        super().__init__()
        self.file = file
        self.sums = BlockSums(BLOCK_SIZE)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        self.file.write(view, self.sums)
        return len(view)
