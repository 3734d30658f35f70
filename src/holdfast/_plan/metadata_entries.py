"""``Metadata.state_dict_metadata`` as the records that plugins see, and as the columns that we work on."""

import ctypes
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast._deferred import DeferredEntries, DeferredList
from holdfast._format.description import (
    OBJECT,
    TENSOR,
    Description,
    Directory,
    column,
    concatenated,
    numbered,
)
from holdfast.errors import MetadataFormatError
from holdfast.metadata import (
    MEMORY_FORMATS,
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)


class MetadataEntries(DeferredEntries[STORAGE_TYPES]):
    """``Metadata.state_dict_metadata``: columns until somebody looks at a key, and then that key alone.

    Attributes:
        columns: What it is made from.
        directory: Where each key's part of the columns begins.
        described: The properties, by their number.
    """

    __slots__ = ("columns", "described", "directory")

    def __init__(
        self, columns: Description, path: str = "the plan", directory: Directory | None = None
    ) -> None:
        self.columns = columns
        self.directory = directory or Directory(columns)
        self.described = [_tensor_properties(*words, path=path) for words in columns.properties]
        super().__init__(self.directory.numbers, self._record)

    def _record(self, _: str, number: int) -> STORAGE_TYPES:
        directory = self.directory
        if directory.kinds[number] == OBJECT:
            return BytesStorageMetadata()
        described = self.described[directory.properties[number]]
        # A new record each time: the caller may change it.
        properties = TensorProperties.__new__(TensorProperties)
        properties.__dict__.update(described.__dict__)
        chunks = DeferredList(directory.count[number], _Chunks(directory, number))
        return TensorStorageMetadata(properties, torch.Size(directory.shape(number)), chunks)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.is_open:
            return super().__reduce_ex__(protocol)
        return MetadataEntries, (self.columns, "the metadata", self.directory)


@dataclass
class _Chunks:
    """Makes the chunks of a key. Equal makers make equal chunks, so lists can be compared before that."""

    directory: Directory
    number: int

    def __call__(self) -> Iterable[ChunkStorageMetadata]:
        size, boxes = torch.Size, self.directory.boxes(self.number)
        return [ChunkStorageMetadata(size(offsets), size(lengths)) for offsets, lengths in boxes]


def unchanged_entries(metadata: Metadata) -> MetadataEntries | None:
    """The entries, if they still equal their columns; None if they were made by hand or changed."""
    entries = metadata.state_dict_metadata
    return entries if isinstance(entries, MetadataEntries) and not entries.is_open else None


def entries_apart(metadata: Metadata) -> Mapping[str, STORAGE_TYPES]:
    """The entries, to be looked at but not changed.

    An entry of the metadata itself is compared with its columns from then on, each time that these are used.
    """
    known = unchanged_entries(metadata)
    if known is None:
        return metadata.state_dict_metadata
    return MetadataEntries(known.columns, "the metadata", known.directory)


def dtypes_of(metadata: Metadata) -> list[torch.dtype]:
    """The dtypes of the description's properties, by their number."""
    words = description_of(metadata).properties
    return [_tensor_properties(*properties, path="the metadata").dtype for properties in words]


def description_of(metadata: Metadata) -> Description:
    """The entries of the metadata as columns, made from the records if somebody has changed those."""
    known, entries = unchanged_entries(metadata), metadata.state_dict_metadata
    if known is not None:
        return known.columns
    tensors = [entry for entry in entries.values() if isinstance(entry, TensorStorageMetadata)]
    chunks = [chunk for entry in tensors for chunk in entry.chunks]
    properties, used = numbered(properties_in_words(*entry.properties.__getstate__()) for entry in tensors)
    return Description(
        keys=list(entries),
        kinds=bytes(TENSOR if isinstance(e, TensorStorageMetadata) else OBJECT for e in entries.values()),
        properties=properties,
        tensor_properties=column(used, "I"),
        tensor_ndims=bytes(len(entry.size) for entry in tensors),
        tensor_shapes=column(concatenated(entry.size for entry in tensors), "q"),
        tensor_chunks=column([len(entry.chunks) for entry in tensors], "I"),
        chunk_offsets=column(concatenated(chunk.offsets for chunk in chunks), "q"),
        chunk_lengths=column(concatenated(chunk.sizes for chunk in chunks), "q"),
    )


def column_of(numbers: torch.Tensor, *, small: bool = False) -> bytes:
    """A tensor of integers as a column: of 64 bits each, or of 32 where that is enough."""
    # The lower half of a number of 64 bits is what a column of unsigned 32 bits wants.
    made = numbers.to(torch.int32 if small else torch.int64).contiguous()
    return ctypes.string_at(made.data_ptr(), made.nbytes) if made.numel() else b""


def boxes_column(sizes: Sequence[Sequence[int]], used: torch.Tensor) -> bytes:
    """The numbers of sizes of different lengths, one size after the other, as a column."""
    most = max(map(len, sizes), default=0)
    if not most or not len(used):
        return b""
    table = torch.tensor([[*size, *[0] * (most - len(size))] for size in sizes], device="cpu")
    ndims = torch.tensor([len(size) for size in sizes], device="cpu")
    return column_of(table[used][torch.arange(most, device="cpu") < ndims[used].unsqueeze(1)])


def is_one_whole_chunk(directory: Directory, number: int) -> bool:
    """Whether a tensor is stored in one piece."""
    begin, end = directory.box_at[number], directory.box_at[number + 1]
    return (
        directory.count[number] == 1
        and directory.lengths[begin:end].tolist() == directory.shape(number)
        and not any(directory.offsets[begin:end])
    )


def chunk_boxes(directory: Directory, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The offsets and the lengths of a tensor's chunks, one row a chunk; at least one of each."""
    begin, end, ndim = directory.box_at[number], directory.box_at[number + 1], directory.ndim[number]
    offsets, lengths = (
        torch.frombuffer(bytearray(column[begin:end]), dtype=torch.int64).view(-1, ndim)
        for column in (directory.offsets, directory.lengths)
    )
    return offsets, lengths


def directory_of(metadata: Metadata) -> Directory:
    """Where each key's part of the columns of ``description_of`` begins."""
    known = unchanged_entries(metadata)
    return Directory(description_of(metadata)) if known is None else known.directory


@functools.lru_cache(maxsize=1024)
def properties_in_words(
    dtype: torch.dtype, layout: torch.layout, requires_grad: bool, memory_format: str, pin_memory: bool
) -> tuple[str, str, bool, str, bool]:
    """Properties as the manifest keeps them: names as torch has them, without the ``torch.``."""
    return _word(dtype), _word(layout), requires_grad, memory_format, pin_memory


def _word(value: object) -> str:
    return str(value).removeprefix("torch.")


_DTYPES = {_word(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_LAYOUTS = {_word(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


def _tensor_properties(
    dtype: str, layout: str, requires_grad: bool, memory_format: str, pin_memory: bool, *, path: str
) -> TensorProperties:
    if dtype not in _DTYPES:
        raise MetadataFormatError(
            f"{path} has a tensor of the dtype {dtype!r}, which torch {torch.__version__} does not have",
            path=path,
            found=dtype,
        )
    return TensorProperties(
        _DTYPES[dtype],
        _LAYOUTS.get(layout, torch.strided),
        requires_grad,
        MEMORY_FORMATS.get(memory_format, torch.contiguous_format),
        pin_memory,
    )
