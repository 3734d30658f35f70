"""Items into a file: containers around raw bytes, checksummed on the way, small ones packed together."""

import ctypes
import io
import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from holdfast._format.description import column
from holdfast._format.torch_item import SMALL_ALIGNMENT, ItemFrame
from holdfast._io.blocks import BLOCK_SIZE, BlockSums, block_checksums, combine_blocks, crc32
from holdfast._io.file_access import FileWriter
from holdfast._io.streams import byte_view, write_all
from holdfast._objects.object_streams import StoredObject
from holdfast._plan.write_columns import WriteColumns
from holdfast._storage.results import WrittenItems
from holdfast._storage.small_items import SMALL, ItemTemplate, frame_of, template_of
from holdfast._tensors.host import copy_of, host_pieces
from holdfast.errors import IncompleteWriteError

# Memory of this size is reused from one pack to the next. Packs of megabytes are given back to the system
# each time, and their pages cost more than all else that is done for a tensor of 4 KiB.
PACK = 256 * 1024


class AppliesToStream(Protocol):
    """What is needed of a stream transform to write."""

    def transform_to(self, output: Any, /) -> Any:
        """A stream whose bytes reach ``output`` transformed."""


@dataclass(eq=False)
class ItemWriter:
    """Writes items one after the other into one new file, and notes where each of them lies.

    Attributes:
        file: Where to.
        file_number: Its number among the files of this rank.
        lines: The plan that the items are lines of.
        transforms: What each item's container goes through; the first one stands next to the file.
        copy_at_once: How many bytes of a tensor are copied at a time, if it must be copied.
        items: Where the items lie that were written so far.
    """

    file: FileWriter
    file_number: int
    lines: WriteColumns
    transforms: Sequence[AppliesToStream]
    copy_at_once: int
    items: WrittenItems = field(default_factory=WrittenItems)
    _packed: list[Any] = field(default_factory=list)
    _packed_nbytes: int = 0
    _templates: dict[int, ItemTemplate] = field(default_factory=dict)

    def add(self, number: int, data: torch.Tensor | io.BytesIO) -> None:
        """Write one line's item. The data may be changed as soon as this returns."""
        frame: ItemFrame | None = None
        if isinstance(data, torch.Tensor):
            _check_planned(self.lines, number, data)
            if not self.transforms and data.nbytes < SMALL:
                self.add_small_tensors([number], [data])
                return
            frame = frame_of(data.dtype, data.shape)
        elif isinstance(data, StoredObject):
            frame = data.item
        # A stream of somebody else has a container of its own.
        if self.transforms:
            self._add_transformed(number, frame, data)
        else:
            self._add_plain(number, frame, data)

    def add_small_tensors(self, numbers: Sequence[int], tensors: Iterable[torch.Tensor]) -> None:
        """Write the items of small chunks, each with its tensor; only without transforms.

        All items of a form begin equally far from an aligned place, so that only payload and checksums
        differ between them: 2 microseconds an item.
        """
        self._pack(bytes(-self._position % SMALL_ALIGNMENT))
        lines, packed, templates = self.lines, self._packed, self._templates
        begin, used, wrap_checksums = self._position, list[ItemTemplate](), list[int]()
        forms, read, crc, checksums = lines.form, ctypes.string_at, crc32, bytearray()
        for number, tensor in zip(numbers, tensors, strict=True):
            form = forms[number]
            template = templates.get(form) or self._make_template(form)
            if tensor.shape != template.shape or tensor.dtype is not template.dtype:
                _check_planned(lines, number, tensor)
            if (
                tensor.is_cpu
                and tensor.is_contiguous()
                and not tensor.is_neg()
                and not (template.is_complex and tensor.is_conj())
            ):
                payload = read(tensor.data_ptr(), template.nbytes)
            else:
                payload = copy_of(tensor)
            checksum = crc(payload)
            sum_bytes = checksum.to_bytes(4, "little")
            tail = sum_bytes.join(template.tail)
            packed += (template.head, payload, tail, template.gap)
            used.append(template)
            wrap_checksums.append(crc(tail, template.head_sum))
            if payload:
                checksums += sum_bytes
        # A file ends with its last item.
        last_gap = packed.pop()
        totals = [template.total for template in used]
        nbytes = [template.item_nbytes for template in used]
        self._note(
            numbers,
            checksums,
            offsets=itertools.accumulate(totals[:-1], initial=begin),
            nbytes=nbytes,
            payload_offsets=[len(template.head) for template in used],
            payload_nbytes=[template.nbytes for template in used],
            raw_nbytes=nbytes,
            blocks=[1 if template.nbytes else 0 for template in used],
            wrap_checksums=wrap_checksums,
        )
        self._packed_nbytes += sum(totals) - len(last_gap)
        self._flush(PACK)

    def _make_template(self, form: int) -> ItemTemplate:
        made = self._templates[form] = template_of(self.lines.forms[form])
        return made

    def finish(self) -> WrittenItems:
        """Make everything durable, and return where each item lies."""
        self._flush()
        self.file.finish()
        return self.items

    @property
    def _position(self) -> int:
        """Where the next byte goes in the file."""
        return self.file.position + self._packed_nbytes

    def _pack(self, content: bytes) -> None:
        self._packed.append(content)
        self._packed_nbytes += len(content)

    def _flush(self, from_nbytes: int = 0) -> None:
        """Write what is packed, if it is this much."""
        if self._packed and self._packed_nbytes >= from_nbytes:
            packed, self._packed, self._packed_nbytes = b"".join(self._packed), [], 0
            self.file.write(packed)

    def _add_plain(self, number: int, frame: ItemFrame | None, data: torch.Tensor | io.BytesIO) -> None:
        position = self._position
        head = frame.head(position) if frame else b""
        self._pack(head)
        payload_nbytes, pieces = self._payload(data)
        if payload_nbytes < SMALL:
            # Copied at once, so that the caller may change it.
            payload = b"".join(pieces)
            self._pack(payload)
            blocks = block_checksums(payload)
        else:
            self._flush()
            sums = BlockSums(BLOCK_SIZE)
            for piece in pieces:
                self.file.write(piece, sums)
            blocks = sums.finish()
        tail = frame.tail(position, combine_blocks(blocks, payload_nbytes)) if frame else b""
        self._pack(tail)
        wrap_checksum = crc32(tail, crc32(head))
        self._note_one(number, position, blocks, len(head), payload_nbytes, None, wrap_checksum)
        self._flush(PACK)

    def _add_transformed(self, number: int, frame: ItemFrame | None, data: torch.Tensor | io.BytesIO) -> None:
        self._flush()
        position = self.file.position
        sink = _TransformSink(self.file)
        stream: Any = sink
        for transform in self.transforms:
            stream = transform.transform_to(stream)
        raw_nbytes = write_all(stream, frame.head(0)) if frame else 0
        checksum = 0
        for piece in self._payload(data)[1]:
            for start in range(0, len(piece), BLOCK_SIZE):
                part = piece[start : start + BLOCK_SIZE]
                checksum = crc32(part, checksum)
                raw_nbytes += write_all(stream, part)
        raw_nbytes += write_all(stream, frame.tail(0, checksum)) if frame else 0
        stream.close()
        self._note_one(number, position, sink.sums.finish(), 0, self._position - position, raw_nbytes, 0)

    def _note_one(
        self,
        number: int,
        position: int,
        blocks: "array[int]",
        payload_offset: int,
        payload_nbytes: int,
        raw_nbytes: int | None,
        wrap_checksum: int,
    ) -> None:
        nbytes = self._position - position
        self._note(
            [number],
            column(blocks, "I"),
            offsets=[position],
            nbytes=[nbytes],
            payload_offsets=[payload_offset],
            payload_nbytes=[payload_nbytes],
            raw_nbytes=[nbytes if raw_nbytes is None else raw_nbytes],
            blocks=[len(blocks)],
            wrap_checksums=[wrap_checksum],
        )

    def _payload(self, data: torch.Tensor | io.BytesIO) -> tuple[int, Iterable[memoryview]]:
        """The bytes of an item without its container: how many, and in pieces."""
        if isinstance(data, torch.Tensor):
            return data.nbytes, host_pieces(data, self.copy_at_once)
        if isinstance(data, StoredObject):
            return data.payload_nbytes, data.pieces()
        # Not getbuffer(): a view of it that an exception keeps alive makes Python 3.12.1 crash.
        payload = memoryview(data.getvalue())
        return payload.nbytes, (payload,)

    def _note(self, numbers: Sequence[int], checksums: bytes | bytearray, **columns: Iterable[int]) -> None:
        lines = self.lines
        self.items.add(
            [lines.keys[number] for number in numbers],
            checksums,
            chunk_offsets=[lines.offset[number] for number in numbers],
            hints=[lines.hints[number] for number in numbers],
            files=[self.file_number] * len(numbers),
            **columns,
        )


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


class _TransformSink(io.RawIOBase):
    """The file's end of a stack of transforms: checksums what arrives, and leaves the file open."""

    def __init__(self, file: FileWriter) -> None:
        super().__init__()
        self.file = file
        self.sums = BlockSums(BLOCK_SIZE)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = byte_view(data)
        self.file.write(view, self.sums)
        return len(view)
