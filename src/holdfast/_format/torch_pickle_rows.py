"""Reads the rows that fill a large metadata pickle many opcodes at a time.

torch pickles every chunk, every tensor and every storage row with the same opcodes in the same order; only
numbers, texts and memo references differ. An early row of each kind teaches the memo references of its class
and field names; with them a regular expression is made that matches each later row whole. A row that looks
different, or has a frame boundary inside, is left to the interpreter, which decides what it means.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, TypeAlias

from holdfast._format.torch_pickle_names import (
    CHUNK,
    INDEX,
    PROPERTIES,
    SIZE,
    STORAGE_INFO,
    TENSOR,
    Built,
    IndexKey,
    Record,
    Symbol,
    make_size,
)
from holdfast._format.torch_pickle_records import TorchProperties, TorchStorage

# What a pickler remembers and never refers to again, such as the dict of a row's fields.
_GONE = Symbol("part", "of a row")

_Match: TypeAlias = Callable[[bytes, int], re.Match[bytes] | None]

_FIRST_LESSON, _LAST_LESSON = 32, 48

_REFERENCE = rb"(?:h.|j....)"
_INT = rb"(?:K.|M..|J....|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7}|\x8a\x08.{8})"
# A text is written out where it is new, as most are in rows that came from other ranks. _decode_text checks
# the length in its second byte.
_TEXT = rb"(h.|j....|\x8c.[ -~]+\x94)"
_DIMS = rb"(\)|%b\x85\x94|%b{2}\x86\x94|%b{3}\x87\x94|\((?:%b){4,64}t\x94)" % ((_INT,) * 4)
_NEW = rb"\)\x81\x94\}\x94\("
_CALLED = rb"\x85\x94R\x94"
# Append the chunk to its list, set the fields, give them to the tensor.
_ONE_CHUNK_ENDS = b"aub"
_TOKENS = re.compile(_INT, re.DOTALL).findall
_PROPERTIES = re.compile(rb"(%b)(%b)(.)(%b)(.)" % ((_REFERENCE,) * 3), re.DOTALL).match

# In turns: what must be referred to at that place (a stand-in, or a field's name), and the opcodes after it.
_CHUNK_ROW = (CHUNK, _NEW, "offsets", b"", SIZE, _DIMS + _CALLED, "sizes", b"", SIZE, _DIMS + _CALLED + b"ub")
_TENSOR_HEAD = (
    *(TENSOR, _NEW, "properties", b"", PROPERTIES),
    rb"\)\x81\x94\((" + _REFERENCE * 2 + rb"[\x88\x89]" + _REFERENCE + rb"[\x88\x89])t\x94b",
    *("size", b"", SIZE, _DIMS + _CALLED, "chunks", rb"\]\x94"),
)
_STORAGE_ROW = (
    *(INDEX, _NEW, "fqn", _TEXT, "index", rb"(?:%b|N)" % _INT),
    *("offset", b"", SIZE, _DIMS + _CALLED + b"ub"),
    *(STORAGE_INFO, _NEW, "relative_path", _TEXT),
    *("offset", rb"(%b)" % _INT, "length", rb"(%b)ub" % _INT),
)
_ROWS: dict[Record, tuple[Any, ...]] = {CHUNK: _CHUNK_ROW, TENSOR: _TENSOR_HEAD, INDEX: _STORAGE_ROW}


@functools.cache
def _compile(record: Record, references: tuple[bytes, ...] | None = None) -> _Match:
    """Match the record's row: with these references, or with a group named after its number for each."""
    row = _ROWS[record]
    parts = []
    for number in range(len(row) // 2):
        parts.append(re.escape(references[number]) if references else rb"(?P<r%d>%b)" % (number, _REFERENCE))
        parts.append(row[2 * number + 1])
    return re.compile(b"".join(parts), re.DOTALL).match


class Rows:
    """The rows of one file. Reads from ``data`` into the interpreter's stack, marks and memo."""

    def __init__(self, data: bytes, stack: list[Any], marks: list[int], memo: list[Any]) -> None:
        self._data = data
        self._stack = stack
        self._marks = marks
        self._memo = memo
        self._dims: dict[bytes, tuple[Any, ...]] = {}
        self.checked_sizes: set[int] = set()
        """The ids of tuples that ``make_size`` has checked; they live as long as this object."""
        self._properties: dict[bytes, TorchProperties | None] = {}
        self._seen = dict.fromkeys(_ROWS, 0)
        self._learned: dict[Record, _Match] = {}
        self._readers = {CHUNK: self._read_chunks, TENSOR: self._read_tensor, INDEX: self._read_storage}

    def read(self, record: Record, pos: int) -> int:
        """Read the row at ``pos``, which refers to ``record`` first, and all that follow it at once.

        Returns the position after them, or 0 where the opcodes are to be interpreted one by one. What
        comes of a row is what the opcodes would have made, as a record: a chunk's two tuples, a tensor's
        properties, an ``IndexKey`` with its ``TorchStorage``. Field values are not checked, except those
        of an ``IndexKey`` and of properties.
        """
        match = self._learned.get(record)
        if match is None:
            match = self._learn(record, pos)
            if match is None:
                return 0
        return self._readers[record](match, pos)

    def _learn(self, record: Record, pos: int) -> _Match | None:
        # Making the expressions takes time of its own: not worth it for a small file.
        seen = self._seen.get(record)
        if seen is None or seen > _LAST_LESSON:
            return None
        self._seen[record] = seen + 1
        found = _compile(record)(self._data, pos) if seen >= _FIRST_LESSON else None
        if found is None:
            return None
        wanted = _ROWS[record][::2]
        references = tuple(found[f"r{number}"] for number in range(len(wanted)))
        for reference, want in zip(references, wanted, strict=True):
            value = self._memo[int.from_bytes(reference[1:], "little")]
            if value is not want and not (type(value) is str and value == want):
                return None
        match = self._learned[record] = _compile(record, references)
        return match

    def _read_chunks(self, match: _Match, pos: int) -> int:
        data, stack, memo, known = self._data, self._stack, self._memo, self._dims
        last = 0
        found = match(data, pos)
        while found:
            raw_offsets, raw_lengths = found.groups()
            offsets = known.get(raw_offsets) or self._decode_dims(raw_offsets)
            lengths = known.get(raw_lengths) or self._decode_dims(raw_lengths)
            chunk = (offsets[-1], lengths[-1])
            memo += (chunk, _GONE)
            memo += offsets
            memo += lengths
            stack.append(chunk)
            last = found.end()
            found = match(data, last)
        return last

    def _read_storage(self, match: _Match, pos: int) -> int:
        data, stack, memo, known = self._data, self._stack, self._memo, self._dims
        last = 0
        found = match(data, pos)
        while found:
            raw_key, raw_offsets, raw_path, raw_offset, raw_nbytes = found.groups()
            key, path = self._decode_text(raw_key), self._decode_text(raw_path)
            if key is None or path is None:
                break
            offsets = known.get(raw_offsets) or self._decode_dims(raw_offsets)
            index = IndexKey((key, offsets[-1]))
            storage = TorchStorage(path, _decode_int(raw_offset), _decode_int(raw_nbytes))
            memo += (index, _GONE, key) if raw_key[0] == 0x8C else (index, _GONE)
            memo += offsets
            memo += (storage, _GONE, path) if raw_path[0] == 0x8C else (storage, _GONE)
            stack += (index, storage)
            last = found.end()
            found = match(data, last)
        return last

    def _read_tensor(self, match: _Match, pos: int) -> int:
        """Read a tensor whole if it has one chunk; otherwise up to its list of chunks, left on the stack."""
        data, stack, memo = self._data, self._stack, self._memo
        found = match(data, pos)
        if found is None:
            return 0
        raw_properties, raw_shape = found.groups()
        if raw_properties not in self._properties:
            self._properties[raw_properties] = self._decode_properties(raw_properties)
        properties = self._properties[raw_properties]
        if properties is None:
            return 0
        shape = self._dims.get(raw_shape) or self._decode_dims(raw_shape)
        tensor, chunks = Built(TENSOR), list[Any]()
        fields: dict[str, Any] = {}
        memo += (tensor, fields, properties, _GONE)
        memo += shape
        memo.append(chunks)
        stack += (tensor, fields)
        mark = len(stack)
        stack += ("properties", properties, "size", shape[-1], "chunks", chunks)
        chunk_row = self._learned.get(CHUNK)
        after = self._read_chunks(chunk_row, found.end()) if chunk_row else 0
        if data[after : after + 3] == _ONE_CHUNK_ENDS and len(stack) == mark + 7:
            chunks.append(stack[-1])
            fields.update(properties=properties, size=shape[-1], chunks=chunks)
            tensor.state = fields
            del stack[mark - 1 :]
            return after + 3
        self._marks.append(mark)
        return after or found.end()

    def _decode_dims(self, raw: bytes) -> tuple[Any, ...]:
        """What a pickler remembers of a ``torch.Size``: its tuple, the arguments, last the size itself."""
        dims = make_size(tuple(_decode_int(token) for token in _TOKENS(raw)))
        # The empty tuple has an opcode of its own and is never remembered.
        remembered = (dims, _GONE, dims) if dims else (_GONE, dims)
        self._dims[raw] = remembered
        self.checked_sizes.add(id(dims))
        return remembered

    def _decode_text(self, raw: bytes) -> str | None:
        if raw[0] == 0x8C:
            return raw[2:-1].decode() if raw[1] == len(raw) - 3 else None
        text = self._memo[int.from_bytes(raw[1:], "little")]
        return text if type(text) is str else None

    def _decode_properties(self, raw: bytes) -> TorchProperties | None:
        parts = _PROPERTIES(raw)
        assert parts is not None
        dtype, layout, requires_grad, memory_format, pin_memory = parts.groups()
        symbols = [self._memo[int.from_bytes(at[1:], "little")] for at in (dtype, layout, memory_format)]
        if [type(symbol) is Symbol and symbol.kind for symbol in symbols] != [
            "dtype",
            "layout",
            "memory_format",
        ]:
            return None
        names = [symbol.name for symbol in symbols]
        return TorchProperties(names[0], names[1], requires_grad == b"\x88", names[2], pin_memory == b"\x88")


def _decode_int(token: bytes) -> int:
    if token[0] == 0x8A:
        return int.from_bytes(token[2:], "little", signed=True)
    return int.from_bytes(token[1:], "little", signed=token[0] == 0x4A)
