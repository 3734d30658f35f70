"""Writes torch's ``.metadata`` pickle from a manifest, opcode by opcode, for stock torch to load.

The opcodes are not those that torch's pickler would have chosen, only the objects they make are: sizes and
properties are written once and referred to after that, and chunks, tensors and storage rows are made by
calling their classes. Rows of one kind are as long as each other, so that those of a sharded tensor are
written together. Stock torch loads the result in less than half the time that its own
pickle takes.
"""

import itertools
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from holdfast._format.description import OBJECT, Directory, column, ints
from holdfast._format.manifest import Manifest
from holdfast._format.pickle_opcodes import Table, reference_number
from holdfast._format.torch_pickle_emitter import Emitter, size_opcodes
from holdfast._format.torch_pickle_records import TorchProperties
from holdfast._format.torch_pickle_storage import storage_rows

__all__ = ["write_torch_metadata"]

# Python's own picklers batch by 1000, which keeps a reader's stack short.
_BATCH = 1000
_FRAME = struct.Struct("<cQ").pack


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
    parts += _batched(_entry_rows(emit, manifest, directory))
    parts.append(text("storage_data") + b"}")
    parts += _batched(storage_rows(emit, manifest, directory))
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
    """Rows of a dict, ready to be set in it, a thousand at a time."""
    while batch := list(itertools.islice(rows, _BATCH)):
        body = b"".join((b"(", *batch, b"u"))
        yield _FRAME(b"\x95", len(body))
        yield body


def _entry_rows(emit: Emitter, manifest: Manifest, directory: Directory) -> Iterator[bytes]:
    """Each key with its metadata."""
    if not any(directory.kinds) and manifest.all_are_whole() and manifest.keys:
        return _rows_of_whole_tensors(emit, manifest, directory)
    return _rows_of_entries(emit, manifest, directory)


def _rows_of_whole_tensors(emit: Emitter, manifest: Manifest, directory: Directory) -> Iterator[bytes]:
    """The same where every key is a tensor in one chunk: rows differ in name and form alone."""
    every, shape_at = manifest.tensor_shapes, [8 * at for at in directory.shape_at]
    shapes = map(every.__getitem__, map(slice, shape_at, shape_at[1:]))
    forms = list(zip(directory.properties, shapes, strict=True))
    numbers = {form: number for number, form in enumerate(forms)}
    # What the rows refer to is defined before the first of them, and leaves nothing on the stack.
    defined = [_one_chunk(emit, manifest, directory, number) + b"0" for number in numbers.values()]
    known = {form: _one_chunk(emit, manifest, directory, number) for form, number in numbers.items()}
    names = emit.new_texts(manifest.keys)
    rows = map(bytes.__add__, names, map(known.__getitem__, forms))
    yield b"".join(defined) + next(rows)
    yield from rows


def _rows_of_entries(emit: Emitter, manifest: Manifest, directory: Directory) -> Iterator[bytes]:
    an_object = emit.names["BytesStorageMetadata"] + b")\x81"
    kinds, counts, properties = directory.kinds, directory.count, directory.properties
    box_at, shape_at, new_text = directory.box_at, directory.shape_at, emit.new_text
    shapes, offsets, lengths = manifest.tensor_shapes, manifest.chunk_offsets, manifest.chunk_lengths
    seen: dict[Any, bytes] = {}
    for number, key in enumerate(manifest.keys):
        name = new_text(key)
        if kinds[number] == OBJECT:
            yield name + an_object
            continue
        if counts[number] != 1:
            yield name + _many_chunks(emit, manifest, directory, number)
            continue
        shape, box = slice(8 * shape_at[number], 8 * shape_at[number + 1]), box_at[number]
        place = slice(8 * box, 8 * box_at[number + 1])
        # Equal tensors differ in their names only.
        what = (properties[number], shapes[shape], offsets[place], lengths[place])
        known = seen.get(what)
        if known is None:
            yield name + _one_chunk(emit, manifest, directory, number)
            seen[what] = _one_chunk(emit, manifest, directory, number)
        else:
            yield name + known


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
