"""The rows of a metadata pickle that say where each item lies."""

import itertools
import struct
from collections.abc import Iterator

from holdfast._format.description import OBJECT, Directory, column, ints
from holdfast._format.manifest import Manifest
from holdfast._format.pickle_opcodes import Table, reference_number
from holdfast._format.torch_pickle_emitter import Emitter, size_opcodes

__all__ = ["storage_rows"]

_NARROW = 1 << 31


def storage_rows(emit: Emitter, manifest: Manifest, directory: Directory) -> Iterator[bytes]:
    """Each index with its storage info."""
    rows = _StorageRows(emit, manifest, directory)
    if not any(directory.kinds) and rows.are_alike(manifest):
        yield from rows.of_whole_tensors(manifest)
        return
    for number, key in enumerate(manifest.keys):
        if directory.count[number] > 1:
            yield rows.of_chunks(key, number)
        else:
            yield rows.of_one(key, number)


class _StorageRows:
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
        self._middles: dict[tuple[int, ...], bytes] = {}
        wide = max(*self.start, *self.nbytes, 0) >= _NARROW if self.start else False
        self.place = struct.Struct("<2sq2sq" if wide else "<cici").pack
        self.int_opcode = b"\x8a\x08" if wide else b"J"

    def are_alike(self, manifest: Manifest) -> bool:
        """Whether all items are tensors in one chunk, without transforms."""
        chunks = set(ints(manifest.tensor_chunks, "I"))
        return not self.has_transforms and chunks <= {1} and not any(manifest.chunk_offsets)

    def of_whole_tensors(self, manifest: Manifest) -> Iterator[bytes]:
        """The rows of all items, where ``are_alike``: joined by loops in C."""
        emit = self.emit
        ndims = sorted(set(manifest.tensor_ndims))
        defined = [emit.text(path) + b"0" for path in self.files if path not in emit.texts]
        defined += [emit.size((0,) * n) + b"0" for n in ndims if (0,) * n not in emit.sizes]
        middles = {n: self._middle((0,) * n) for n in ndims}
        names = map(emit.texts.__getitem__, manifest.keys)
        paths = map([emit.texts[path] for path in self.files].__getitem__, self.file)
        opcode = itertools.repeat(self.int_opcode)
        places = map(self.place, opcode, self.start, opcode, self.nbytes)
        shapes = map(middles.__getitem__, manifest.tensor_ndims)
        parts = zip(itertools.repeat(self.head), names, shapes, paths, places, itertools.repeat(b"\x87R"))
        # The definitions go first, and push and pop without leaving anything behind.
        first = next(parts, None)
        if first is not None:
            yield b"".join((*defined, *first))
            yield from map(b"".join, parts)

    def of_one(self, key: str, number: int) -> bytes:
        """The row of an object, or of a tensor's only chunk."""
        emit, directory = self.emit, self.directory
        row = directory.row[number]
        if directory.kinds[number] == OBJECT:
            # Without an offset the field is missing: torch does not set it either.
            middle = self.number_field + b"Nub" + self.info_class
        elif directory.count[number] == 0:
            return b""
        else:
            at = tuple(directory.offsets[directory.box_at[number] : directory.box_at[number + 1]])
            known = self._middles.get(at)
            middle = self._middle(at) if known is None else known
        if self.has_transforms and self.stacks[self.transforms[row]]:
            return self.head + emit.texts[key] + middle + self._transformed(row)
        path = self.files[self.file[row]]
        place = self.place(self.int_opcode, self.start[row], self.int_opcode, self.nbytes[row])
        return b"".join(
            (self.head, emit.texts[key], middle, emit.texts.get(path) or emit.text(path), place, b"\x87R")
        )

    def _middle(self, at: tuple[int, ...]) -> bytes:
        """What stands between the key and the place; the first time with a size that others refer to."""

        def made() -> bytes:
            size = self.emit.size(at)
            return self.number_field + b"K\0" + self.offset_field + size + b"ub" + self.info_class

        first = made()
        self._middles[at] = made()
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
        """What defines the paths of some items where they are new, and the numbers that refer to them."""
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
