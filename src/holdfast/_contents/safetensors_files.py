"""Owns reading what safetensors files hold: the files of a model as the manifest of a checkpoint.

The manifest has the form of our own checkpoints, so that whatever reads those reads these: ranges, small
tensors together, shared reads. Nothing but headers, the index and checksums is read here.
"""

import itertools
import logging
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any, NamedTuple

import msgspec

from holdfast._contents.safetensors_manifest import ModelChunk, manifest_of_chunks
from holdfast._format.manifest import Manifest
from holdfast._format.names import METADATA
from holdfast._format.safetensors import LENGTH_NBYTES, SUFFIX, Header, header_nbytes, parse_header
from holdfast._format.safetensors_checksums import (
    IDENTITY,
    LARGEST_CHECKSUMS,
    FileChecksums,
    digest_of,
    load_checksums,
)
from holdfast._format.safetensors_index import (
    CHECKSUMS,
    INDEX,
    LONE,
    find_index,
    missing_numbers,
    parse_index,
    save_in_name,
    save_of_temporary,
)
from holdfast._geometry import Box, check_cover
from holdfast._human_units import some_of
from holdfast._io import pool
from holdfast._io.blocks import BLOCK_SIZE, block_count
from holdfast._io.store import FileSource
from holdfast.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    MetadataFormatError,
)

logger = logging.getLogger(__name__)

LARGEST_INDEX = 1 << 30
_SHARDING_INFO = "DCP_SHARDING_INFO"
"""The name in a header under which torch keeps which part of each tensor the file has."""


class ModelFile(NamedTuple):
    """One safetensors file.

    Attributes:
        name: Its name.
        nbytes: Its size.
        header: What it holds.
        digest: The digest of its header.
    """

    name: str
    nbytes: int
    header: Header
    digest: str


def read_model_manifest(store: FileSource, *, only: str | None = None) -> Manifest:
    """The manifest of what the safetensors files of a folder hold; see ``read_model_chunks``."""
    files, chunks = read_model_chunks(store, only=only)
    return manifest_of_chunks(store.url, files, chunks)


def read_model_chunks(
    store: FileSource, *, only: str | None = None
) -> tuple[dict[str, int], list[ModelChunk]]:
    """What the safetensors files of a folder hold, whoever wrote them: the files' sizes, and the tensors.

    An index decides which file has which tensor. Without one, ``model.safetensors`` is the model, and where
    there is no such file all safetensors files are.

    Args:
        store: The folder.
        only: Look at this file alone, whatever an index says.

    Raises:
        CheckpointNotFoundError: There is no safetensors file.
        IncompleteCheckpointError: A file, a tensor or a part of a tensor is missing.
        IntegrityError: A file is damaged.
    """
    weight_map, names = find_model_files(store) if only is None else (None, [only])
    files = read_headers(store, names)
    return {file.name: file.nbytes for file in files}, _chunks_of(store, files, weight_map)


def find_model_files(store: FileSource) -> tuple[dict[str, str] | None, list[str]]:
    """The file of each tensor, if there is an index; and the files of the model.

    Raises:
        CheckpointNotFoundError: There is no safetensors file.
        IncompleteCheckpointError: Files are missing, as the names of others show.
    """
    there = store.known_names(INDEX, LONE)
    index = find_index(there)
    if index is not None:
        path = f"{store.url}/{index}"
        weight_map = parse_index(store.read(index, max_bytes=LARGEST_INDEX), path=path)
        return weight_map, sorted(set(weight_map.values()))
    found = sorted(name for name in there if name.endswith(SUFFIX) and not save_of_temporary(name))
    if not found:
        raise _nothing_found(store, there)
    # Files that are named after a save belong to no model but by an index: the save was killed.
    found = [name for name in found if save_in_name(name) is None] or found
    if LONE in found:
        _warn_of_others(store, [name for name in found if name != LONE])
        return None, [LONE]
    missing = missing_numbers(found)
    if missing:
        raise IncompleteCheckpointError(
            f"{store.url}: {some_of(missing, 3)} of the model's files are missing, as the names of the "
            "others show. Copy them, too.",
            path=f"{store.url}/{missing[0]}",
        )
    return None, found


def _nothing_found(store: FileSource, there: Collection[str]) -> CheckpointNotFoundError:
    hint = (
        "It has a checkpoint of another kind: load it with FileSystemReader."
        if METADATA in there
        else f"A model is a folder with {LONE}, or with {INDEX} and the files that it names."
    )
    return CheckpointNotFoundError(f"{store.url} has no safetensors files. {hint}", path=store.url)


def _warn_of_others(store: FileSource, others: list[str]) -> None:
    if others:
        logger.warning("%s has no index; %s is loaded, and not %s", store.url, LONE, some_of(others, 3))


def read_headers(store: FileSource, names: Iterable[str]) -> list[ModelFile]:
    """The headers of files, several at a time.

    Raises:
        IncompleteCheckpointError: A file is missing.
        IntegrityError: A file is damaged.
    """
    jobs = [partial(_read_header, store, name) for name in names]
    return pool.run(jobs, threads=store.traits.requests_in_flight)


def _read_header(store: FileSource, name: str) -> ModelFile:
    path = f"{store.url}/{name}"
    try:
        with store.open(name) as file:
            # Most headers are short: one request instead of two.
            data = bytearray(min(1 << 16, file.nbytes))
            file.read_into(0, data)
            length = header_nbytes(data[:LENGTH_NBYTES], file.nbytes, path=path)
            more = bytearray(max(0, length - len(data)))
            if more:
                file.read_into(len(data), more)
            data = (data + more)[:length]
            return ModelFile(name, file.nbytes, parse_header(data, file.nbytes, path=path), digest_of(data))
    except CheckpointNotFoundError as error:
        raise IncompleteCheckpointError(
            f"{path} is missing: the index names it. It was deleted, or was not copied with the rest. Put it "
            "back, or load another model.",
            path=path,
        ) from error


def _chunks_of(
    store: FileSource, files: list[ModelFile], weight_map: dict[str, str] | None
) -> list[ModelChunk]:
    """The chunks of all tensors of a model, with their checksums; each tensor is known to be complete."""
    checksums = read_checksums(store)
    found: dict[Any, ModelChunk] = {}  # by key, and parts of tensors by key and place
    parts: dict[str, list[ModelChunk]] = {}
    unknown = []
    for file in files:
        sums = _checksums_of(file, checksums.get(file.digest))
        if checksums and sums is None:
            unknown.append(file.name)
        shards = _shard_offsets(file, store)
        for tensor, checked in zip(file.header.tensors, sums or itertools.repeat(None), strict=False):
            key = tensor.key
            if weight_map is not None and weight_map.get(key) != file.name:
                continue
            offsets = shards.get(key)
            place = key if offsets is None else (key, offsets)
            chunk = ModelChunk(tensor, offsets or (0,) * len(tensor.shape), file.name, checked)
            before = found.setdefault(place, chunk)
            if offsets is not None:
                parts.setdefault(key, [])
            elif before is not chunk:
                raise _twice(store, key, before.file, file.name)
    if unknown:
        logger.warning(
            "%s: %s is not the file that the checksums are of, and is loaded unchecked", store.url, unknown[0]
        )
    if weight_map is not None:
        _check_index(store, weight_map, found.keys() | parts.keys() if parts else found)
    for chunk in found.values() if parts else ():
        if chunk.tensor.key in parts:
            parts[chunk.tensor.key].append(chunk)
    for key, chunks in parts.items():
        _check_chunks(store, key, chunks)
    return list(found.values())


def _shard_offsets(file: ModelFile, store: FileSource) -> dict[str, tuple[int, ...]]:
    """Where the parts of tensors begin that torch's sharded files have; empty for whole tensors."""
    text = file.header.attributes.get(_SHARDING_INFO)
    if not text:
        return {}
    try:
        stored = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
        offsets = {
            key: msgspec.convert(entry["saved_offsets"], tuple[int, ...])
            for key, entry in stored.items()
            if "saved_offsets" in entry
        }
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MetadataFormatError(
            f"{store.url}/{file.name} says which parts of tensors it has in an unknown way: {error}",
            path=f"{store.url}/{file.name}",
        ) from error
    for tensor in file.header.tensors:
        found = offsets.get(tensor.key)
        if found is not None and (len(found) != len(tensor.shape) or min(found, default=0) < 0):
            raise MetadataFormatError(
                f"{store.url}/{file.name}: {tensor.key} of shape {list(tensor.shape)} cannot begin at "
                f"{list(found)}",
                key=tensor.key,
                path=f"{store.url}/{file.name}",
            )
    return offsets


def _twice(store: FileSource, key: str, one: str, other: str) -> MetadataFormatError:
    return MetadataFormatError(
        f"{key} is in {one} and in {other} of {store.url}, and no index says which of them is meant. Remove "
        "the files that do not belong to the model.",
        key=key,
        path=f"{store.url}/{other}",
    )


def _check_index(store: FileSource, weight_map: dict[str, str], found: Collection[str]) -> None:
    for key, name in weight_map.items():
        if key not in found:
            raise IncompleteCheckpointError(
                f"{key}: the index of {store.url} says that {name} has it, and it has not. The file is not "
                "the one that the index was made for; copy both from the same place.",
                key=key,
                path=f"{store.url}/{name}",
            )


def _check_chunks(store: FileSource, key: str, chunks: list[ModelChunk]) -> None:
    """Raise unless the chunks cover the tensor. A part at its end that no file has cannot be noticed."""
    if len(chunks) == 1 and not any(chunks[0].offsets):
        return  # it is whole by itself
    shape = chunks[0].tensor_shape(chunks)
    boxes = [Box(chunk.offsets, chunk.tensor.shape) for chunk in chunks]
    if len({(chunk.tensor.dtype, len(chunk.offsets)) for chunk in chunks}) > 1:
        raise MetadataFormatError(f"{key}: the files of {store.url} disagree about its dtype", key=key)
    problems = check_cover(shape, boxes)
    if problems:
        names = ", ".join(sorted({chunk.file for chunk in chunks})[:5])
        raise IncompleteCheckpointError(
            f"{key}: the files of {store.url} do not have all of it, or are of several models: {problems[0]} "
            f"({names})",
            key=key,
            path=store.url,
        )


def read_checksums(store: FileSource) -> dict[str, FileChecksums]:
    """The checksums of a folder's files, by the digests of their headers; empty if there are none.

    A file of checksums that cannot be read is ignored with a warning: others may have written the rest anew.
    """
    try:
        data = store.read(CHECKSUMS, max_bytes=LARGEST_CHECKSUMS)
        return load_checksums(data, BLOCK_SIZE, path=f"{store.url}/{CHECKSUMS}")
    except CheckpointNotFoundError:
        return {}
    except CheckpointError as error:
        logger.warning("%s: files are loaded unchecked: %s", store.url, error)
        return {}


def _checksums_of(file: ModelFile, sums: FileChecksums | None) -> list[bytes] | None:
    """The checksums of each tensor of a file; None if they are not known, or of another file."""
    if sums is None or IDENTITY not in file.header.attributes or sums.nbytes != file.nbytes:
        return None
    blocks = [block_count(tensor.nbytes) for tensor in file.header.tensors]
    ends = [4 * end for end in itertools.accumulate(blocks, initial=0)]
    if ends[-1] != len(sums.checksums):
        return None
    return [sums.checksums[begin:end] for begin, end in itertools.pairwise(ends)]
