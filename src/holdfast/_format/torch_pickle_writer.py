"""Writes torch's ``.metadata`` pickle from a manifest, opcode by opcode, for stock torch to load.

The opcodes are not those that torch's pickler would have chosen, only the objects they make are: sizes and
properties are written once and referred to after that, and chunks, tensors and storage rows are made by
calling their classes. Rows of one kind are as long as each other, so that those of a tensor of many chunks
are written together. Stock torch loads the result in less than half the time that its own pickle takes.
"""

import itertools
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from holdfast._format.description import Directory, column, ints
from holdfast._format.manifest import Manifest
from holdfast._format.pickle_opcodes import Table, reference_number
from holdfast._format.torch_pickle_emitter import Emitter, size_opcodes
from holdfast._format.torch_pickle_records import TorchProperties

# Python's own picklers batch by 1000, which keeps a reader's stack short.
_BATCH = 1000
# The rows of more chunks than this are written together.
_FEW = 16
_FRAME = struct.Struct("<cQ").pack
_NARROW = 1 << 31


def write_torch_metadata(
    manifest: Manifest,
    *,
    directory: Directory | None = None,
    planner_data: Any = None,
    modules: Sequence[str] = (),
    version: str | None = None,
) -> bytes:
    """The pickle of a ``torch.distributed.checkpoint.metadata.Metadata`` for stock torch 2.6 and later.

    Args:
        manifest: What the checkpoint holds and where it lies. Torch 2.6 cannot read items with transforms.
        directory: Where each key's part of the manifest begins, if that is known already.
        planner_data: None, bool, int, float, str, bytes, bytearray, and dict, OrderedDict, list, tuple, set
            and frozenset of them. Subclasses of str, dict, list and tuple are written as these.
        modules: For people who look into the file; torch does not use them.
        version: torch's number of the format, ``"1.0.0"`` since it has one.

    Raises:
        UsageError: ``planner_data`` is not plain, or a dtype, layout or memory format is not one that torch
            can have in its metadata.
    """
    emit = Emitter()
    name, text = emit.names, emit.text
    directory = directory or Directory(manifest)
    parts = [
        b"\x80\x04" + emit.prologue() + name["Metadata"] + b")\x81}(" + text("state_dict_metadata") + b"}"
    ]
    parts += _batched(_rows_of_entries(emit, manifest, directory))
    parts.append(text("storage_data") + b"}")
    parts += _batched(_StorageRows(emit, manifest, directory).of_all())
    parts.append(text("planner_data"))
    if isinstance(planner_data, dict) and not isinstance(planner_data, OrderedDict):
        parts.append(b"}")
        parts += _batched(emit.plain_pairs(planner_data))
    else:
        parts.append(emit.plain(planner_data))
    meta = {
        "checkpoint_id": manifest.checkpoint_id,
        "save_id": manifest.save_id,
        "load_id": None,
        "modules": list(modules),
    }
    parts += (text("storage_meta"), name["StorageMeta"], b")\x81", emit.plain(meta), b"b")
    parts += (text("version"), emit.plain(version), b"ub.")
    return b"".join(parts)


def _batched(rows: Iterator[bytes]) -> Iterator[bytes]:
    """The rows of a dict in batches of a thousand, each with the opcode that sets them."""
    while batch := list(itertools.islice(rows, _BATCH)):
        body = b"".join((b"(", *batch, b"u"))
        yield _FRAME(b"\x95", len(body))
        yield body


def _rows_of_entries(emit: Emitter, manifest: Manifest, directory: Directory) -> Iterator[bytes]:
    """Each key with its metadata."""
    an_object = emit.names["BytesStorageMetadata"] + b")\x81"
    kinds, properties, new_text = directory.kinds, directory.properties, emit.new_text
    seen: dict[Any, bytes | None] = {}
    for number, key in enumerate(manifest.keys):
        name = new_text(key)
        if kinds[number]:
            yield name + an_object
            continue
        # Equal tensors differ in their names only. The first of them may define what later ones refer to.
        what = (properties[number], directory.layout(number))
        known = seen.get(what)
        if known is None:
            known = _of_tensor(emit, manifest, directory, number)
            seen[what] = known if what in seen else None
        yield name + known


def _of_tensor(emit: Emitter, manifest: Manifest, directory: Directory, number: int) -> bytes:
    describe = _one_chunk if directory.count[number] == 1 else _many_chunks
    return describe(emit, manifest, directory, number)


def _head(emit: Emitter, manifest: Manifest, directory: Directory, number: int) -> bytes:
    # Asked for in the order of writing: whatever is new defines what later ones refer to.
    properties = emit.properties(TorchProperties(*manifest.properties[directory.properties[number]]))
    return emit.names["TensorStorageMetadata"] + properties + emit.size(tuple(directory.shape(number)))


def _one_chunk(emit: Emitter, manifest: Manifest, directory: Directory, number: int) -> bytes:
    head = _head(emit, manifest, directory, number)
    ((offsets, lengths),) = directory.boxes(number)
    first, second = emit.size(tuple(offsets)), emit.size(tuple(lengths))
    return b"%b]%b%b%b\x86Ra\x87R" % (head, emit.names["ChunkStorageMetadata"], first, second)


def _many_chunks(emit: Emitter, manifest: Manifest, directory: Directory, number: int) -> bytes:
    count, ndim = directory.count[number], directory.ndim[number]
    if not count:
        return _head(emit, manifest, directory, number) + b"]\x87R"
    where = slice(8 * directory.box_at[number], 8 * directory.box_at[number + 1])
    offsets, lengths = manifest.chunk_offsets[where], manifest.chunk_lengths[where]
    # Defined before the rows, so that all rows refer to them and are equally long.
    sizes = (
        [tuple(box[1]) for box in directory.boxes(number)] if lengths != lengths[: 8 * ndim] * count else []
    )
    different = dict.fromkeys(sizes or [tuple(ints(lengths[: 8 * ndim], "q"))])
    defined = b"".join(emit.size(size) + b"0" for size in different if size not in emit.sizes)
    head = _head(emit, manifest, directory, number)
    opening, closing = size_opcodes(emit, ndim)
    table = Table().text(emit.names["ChunkStorageMetadata"] + opening)
    for dimension in range(ndim):
        table.number(offsets, 8 * dimension, 8 * ndim)
    table.text(closing)
    if sizes:
        numbers = {size: reference_number(emit.sizes[size]) for size in different}
        table.reference(column(map(numbers.__getitem__, sizes), "I"))
    else:
        table.text(emit.sizes[next(iter(different))])
    return b"".join((defined, head, b"](", table.text(b"\x86R").filled(count), b"e\x87R"))


class _StorageRows:
    """The rows that say where each item lies."""

    def __init__(self, emit: Emitter, manifest: Manifest, directory: Directory) -> None:
        self.emit = emit
        self.manifest = manifest
        self._path_columns: dict[bytes, bytes] = {}
        self.directory = directory
        self.head = emit.names["MetadataIndex"] + b")\x81}(" + emit.text("fqn")
        self.number_field, self.offset_field = emit.text("index"), emit.text("offset")
        self.info_class = emit.names["_StorageInfo"]
        self.file = ints(manifest.item_files, "I").tolist()
        self.start = ints(manifest.item_offsets, "q").tolist()
        self.nbytes = ints(manifest.item_nbytes, "q").tolist()
        self.transforms = ints(manifest.item_transforms, "I").tolist()
        self.stacks = manifest.transforms
        self.files = manifest.file_names
        self.has_transforms = any(manifest.transforms)
        self._middles: dict[tuple[int, bytes], bytes] = {}
        wide = max(*self.start, *self.nbytes, 0) >= _NARROW if self.start else False
        self.place = struct.Struct("<2sq2sq" if wide else "<cici").pack
        self.int_opcode = b"\x8a\x08" if wide else b"J"

    def of_all(self) -> Iterator[bytes]:
        """The rows of all items."""
        directory, offsets, middles = self.directory, self.manifest.chunk_offsets, self._middles
        kinds, counts, box_at, rows = directory.kinds, directory.count, directory.box_at, directory.row
        texts, paths, text, head = self.emit.texts, self.files, self.emit.text, self.head
        file, start, nbytes, place, opcode = self.file, self.start, self.nbytes, self.place, self.int_opcode
        # Without an offset the field is missing: torch does not set it either.
        of_object = self.number_field + b"Nub" + self.info_class
        for number, key in enumerate(self.manifest.keys):
            if counts[number] > _FEW:
                yield self.of_chunks(key, number)
                continue
            box, step = 8 * box_at[number], 8 * directory.ndim[number]
            for chunk, row in enumerate(range(rows[number], rows[number + 1])):
                what = (chunk, offsets[box : box + step])
                box += step
                middle = of_object if kinds[number] else middles.get(what) or self._middle(*what)
                if self.has_transforms and self.stacks[self.transforms[row]]:
                    yield head + texts[key] + middle + self._transformed(row)
                    continue
                path = paths[file[row]]
                where = texts.get(path) or text(path)
                yield b"".join(
                    (
                        head,
                        texts[key],
                        middle,
                        where,
                        place(opcode, start[row], opcode, nbytes[row]),
                        b"\x87R",
                    )
                )

    def _middle(self, chunk: int, at: bytes) -> bytes:
        """The opcodes between key and place. The first result defines the size that later ones refer to."""
        dims = tuple(ints(at, "q"))

        def made() -> bytes:
            size = self.emit.size(dims)
            return self.number_field + b"K%c" % chunk + self.offset_field + size + b"ub" + self.info_class

        first = made()
        self._middles[chunk, at] = made()
        return first

    def _transformed(self, row: int) -> bytes:
        # torch 2.6 has no such parameter, but takes the state.
        fields = {
            "relative_path": self.files[self.file[row]],
            "offset": self.start[row],
            "length": self.nbytes[row],
            "transform_descriptors": list(self.stacks[self.transforms[row]]),
        }
        return b")\x81" + self.emit.plain(fields) + b"b"

    def of_chunks(self, key: str, number: int) -> bytes:
        """The rows of all chunks of a tensor."""
        emit, directory, manifest = self.emit, self.directory, self.manifest
        begin, end, ndim = directory.row[number], directory.row[number + 1], directory.ndim[number]
        opening, closing = size_opcodes(emit, ndim)
        boxes = manifest.chunk_offsets[8 * directory.box_at[number] : 8 * directory.box_at[number + 1]]
        count = end - begin
        table = Table().text(self.head + emit.texts[key] + self.number_field)
        table.number(column(range(count), "q")).text(self.offset_field + opening)
        for dimension in range(ndim):
            table.number(boxes, 8 * dimension, 8 * ndim)
        table.text(closing + b"ub" + self.info_class)
        if self.has_transforms and any(self.stacks[self.transforms[row]] for row in range(begin, end)):
            names, length = table.filled(count), len(table)
            return b"".join(
                names[at * length : (at + 1) * length] + self._transformed(begin + at) for at in range(count)
            )
        defined, references = self._references(begin, end)
        table.reference(references)
        table.number(manifest.item_offsets[8 * begin : 8 * end])
        table.number(manifest.item_nbytes[8 * begin : 8 * end]).text(b"\x87R")
        return defined + table.filled(count)

    def _references(self, begin: int, end: int) -> tuple[bytes, bytes]:
        """The opcodes that define the new ones of some items' paths, and a column of references to all."""
        emit, used = self.emit, self.file[begin:end]
        column_of_files = bytes(self.manifest.item_files[4 * begin : 4 * end])
        known = self._path_columns.get(column_of_files)
        if known is not None:
            return b"", known
        new = [file for file in dict.fromkeys(used) if self.files[file] not in emit.texts]
        defined = b"".join(emit.text(self.files[file]) + b"0" for file in new)
        numbers = {file: reference_number(emit.texts[self.files[file]]) for file in set(used)}
        made = self._path_columns[column_of_files] = column(map(numbers.__getitem__, used), "I")
        return defined, made
