"""Writes metadata pickles of torch's classes with any content, sensible or not, to try readers on."""

import itertools
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from holdfast._format.pickle_opcodes import encode_int
from holdfast._format.torch_pickle_emitter import Emitter
from holdfast._format.torch_pickle_records import Ints, TorchObject, TorchTensor

__all__ = ["StorageRow", "iter_torch_metadata", "write_torch_metadata"]

StorageRow: TypeAlias = tuple[str, Ints | None, int | None, str, int, int, tuple[str, ...] | None]
"""Key, offsets of the chunk (None for an object), its number, path, offset in the file, bytes, transforms."""

# Python's own picklers batch by 1000, which keeps a reader's stack short.
_BATCH = 1000
_FRAME = struct.Struct("<cQ").pack


def write_torch_metadata(
    *,
    entries: Iterable[tuple[str, TorchTensor | TorchObject | None]],
    storage: Iterable[StorageRow],
    planner_data: Any = None,
    checkpoint_id: str | None = None,
    save_id: str | None = None,
    load_id: str | None = None,
    modules: Sequence[str] = (),
    version: str | None = None,
) -> bytes:
    """The pickle of a ``torch.distributed.checkpoint.metadata.Metadata`` for stock torch 2.6 and later.

    Args:
        entries: Flat names in the order that ``state_dict_metadata`` is to have, each with its tensor; None
            or a ``TorchObject`` for anything else. A plain tuple of properties, shape and chunks will do.
        storage: One row per chunk and object. Torch 2.6 cannot read rows with descriptors.
        planner_data: None, bool, int, float, str, bytes, bytearray, and dict, OrderedDict, list, tuple, set
            and frozenset of them. Subclasses of str, dict, list and tuple are written as these.
        checkpoint_id: For people who look into the file; torch does not use it.
        save_id: As above.
        load_id: As above.
        modules: As above.
        version: torch's number of the format, ``"1.0.0"`` since it has one.

    Numbers and paths are written as given; equal tensor properties become one shared object.

    Raises:
        UsageError: ``planner_data`` is not plain, or a dtype, layout or memory format is not one that torch
            can have in its metadata.
    """
    return b"".join(
        iter_torch_metadata(
            entries=entries,
            storage=storage,
            planner_data=planner_data,
            checkpoint_id=checkpoint_id,
            save_id=save_id,
            load_id=load_id,
            modules=modules,
            version=version,
        )
    )


def iter_torch_metadata(
    *,
    entries: Iterable[tuple[str, TorchTensor | TorchObject | None]],
    storage: Iterable[StorageRow],
    planner_data: Any = None,
    checkpoint_id: str | None = None,
    save_id: str | None = None,
    load_id: str | None = None,
    modules: Sequence[str] = (),
    version: str | None = None,
) -> Iterator[bytes]:
    """As ``write_torch_metadata``, in pieces of about a thousand rows; both iterables are read as it goes."""
    emit = Emitter()
    name, text = emit.names, emit.text
    yield b"\x80\x04" + emit.prologue() + name["Metadata"] + b")\x81}(" + text("state_dict_metadata") + b"}"
    for batch in _batched(_entry_rows(emit, entries)):
        yield _framed([b"(", *batch, b"u"])
    yield text("storage_data") + b"}"
    for batch in _batched(_storage_rows(emit, storage)):
        yield _framed([b"(", *batch, b"u"])
    yield text("planner_data")
    if isinstance(planner_data, dict) and not isinstance(planner_data, OrderedDict):
        yield b"}"
        for batch in _batched(emit.plain_pairs(planner_data)):
            yield _framed([b"(", *batch, b"u"])
    else:
        yield emit.plain(planner_data)
    meta = {"checkpoint_id": checkpoint_id, "save_id": save_id, "load_id": load_id, "modules": list(modules)}
    yield b"".join((text("storage_meta"), name["StorageMeta"], b")\x81", emit.plain(meta), b"b"))
    yield b"".join((text("version"), emit.plain(version), b"ub."))


def _batched(rows: Iterator[bytes]) -> Iterator[list[bytes]]:
    while batch := list(itertools.islice(rows, _BATCH)):
        yield batch


def _framed(parts: list[bytes]) -> bytes:
    body = b"".join(parts)
    return _FRAME(b"\x95", len(body)) + body


def _entry_rows(
    emit: Emitter, entries: Iterable[tuple[str, TorchTensor | TorchObject | None]]
) -> Iterator[bytes]:
    """Each key with its metadata, ready to be set in a dict."""
    texts, sizes, text, size = emit.texts, emit.sizes, emit.text, emit.size
    tensor_class = emit.names["TensorStorageMetadata"]
    chunk_class = emit.names["ChunkStorageMetadata"]
    an_object = emit.names["BytesStorageMetadata"] + b")\x81"
    for key, entry in entries:
        # Written first, because whatever comes first is what later references count from.
        name = texts.get(key) or text(key)
        if entry is None or isinstance(entry, TorchObject):
            yield name + an_object
            continue
        properties, shape, chunks = entry
        head = name + tensor_class + emit.properties(properties) + (sizes.get(shape) or size(shape))
        if len(chunks) == 1:
            ((offsets, lengths),) = chunks
            first = sizes.get(offsets) or size(offsets)
            yield b"%b]%b%b%b\x86Ra\x87R" % (head, chunk_class, first, sizes.get(lengths) or size(lengths))
            continue
        parts = [head, b"]("]
        for offsets, lengths in chunks:
            parts += (
                chunk_class,
                sizes.get(offsets) or size(offsets),
                sizes.get(lengths) or size(lengths),
                b"\x86R",
            )
        parts.append(b"e\x87R")
        yield b"".join(parts)


def _storage_rows(emit: Emitter, rows: Iterable[StorageRow]) -> Iterator[bytes]:
    """Each index with its storage info, ready to be set in a dict."""
    texts, sizes, text, size = emit.texts, emit.sizes, emit.text, emit.size
    index_head = emit.names["MetadataIndex"] + b")\x81}(" + text("fqn")
    number_field, offset_field = text("index"), text("offset")
    info_class = emit.names["_StorageInfo"]
    for key, offsets, number, path, offset, nbytes, descriptors in rows:
        index = (
            index_head,
            texts.get(key) or text(key),
            number_field,
            b"N" if number is None else encode_int(number),
            # Without an offset the field is missing: torch does not set it either.
            b"ub" if offsets is None else offset_field + (sizes.get(offsets) or size(offsets)) + b"ub",
            info_class,
        )
        if descriptors:
            # torch 2.6 has no such parameter, but takes the state.
            fields = {"relative_path": path, "offset": offset, "length": nbytes}
            info = (b")\x81", emit.plain({**fields, "transform_descriptors": list(descriptors)}), b"b")
        else:
            info = (texts.get(path) or text(path), encode_int(offset), encode_int(nbytes) + b"\x87R")
        yield b"".join(index + info)
