"""The tensors of safetensors files as a manifest of our own kind, and as a listing; made from headers."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from holdfast._contents.inventory import StoredChunk, TensorEntry, tensor_nbytes
from holdfast._format.foreign_manifest import foreign_manifest
from holdfast._format.item_table import StorageInfo
from holdfast._format.manifest import Manifest
from holdfast._format.safetensors import StoredTensor
from holdfast._format.torch_pickle_records import TorchProperties, TorchTensor


class ModelChunk(NamedTuple):
    """A tensor of a file: a whole tensor, or a chunk of one.

    Attributes:
        tensor: What the file's header says of it.
        offsets: Where it begins in the whole tensor.
        file: The name of the file.
        checksums: The CRC-32 of each of its blocks; None if they are not known.
    """

    tensor: StoredTensor
    offsets: tuple[int, ...]
    file: str
    checksums: bytes | None

    @staticmethod
    def tensor_shape(chunks: Sequence["ModelChunk"]) -> tuple[int, ...]:
        """The shape of the smallest tensor that has all these chunks."""
        if len(chunks) == 1 and not any(chunks[0].offsets):
            return chunks[0].tensor.shape
        ends = [map(sum, zip(chunk.offsets, chunk.tensor.shape, strict=True)) for chunk in chunks]
        return tuple(map(max, zip(*ends, strict=True)))


def manifest_of_chunks(url: str, files: Mapping[str, int], chunks: Sequence[ModelChunk]) -> Manifest:
    """The manifest of a checkpoint that consists of these chunks.

    Args:
        url: The place.
        files: The sizes of its files, by name.
        chunks: The chunks.
    """
    by_key = _by_key(chunks)
    rows = [chunk for of_key in by_key.values() for chunk in of_key]
    numbers = {name: number for number, name in enumerate(files)}
    sizes = [chunk.tensor.nbytes for chunk in rows]
    columns = {
        "files": [numbers[chunk.file] for chunk in rows],
        "offsets": [chunk.tensor.begin for chunk in rows],
        "nbytes": sizes,
        "payload_nbytes": sizes,
        "raw_nbytes": sizes,
        "blocks": [len(chunk.checksums or b"") // 4 for chunk in rows],
    }
    return foreign_manifest(
        {key: _entry(of_key) for key, of_key in by_key.items()},
        columns,
        files,
        software="safetensors",
        world_size=1,
        checkpoint_id=url,
        checksums=b"".join(chunk.checksums or b"" for chunk in rows),
    )


class _ModelChunks(NamedTuple):
    """The chunks of a model's files, each made into a record when somebody asks."""

    rows: list[ModelChunk]

    def chunks(self, entry: TensorEntry) -> list[StoredChunk]:
        of_key = self.rows[entry.row : entry.row + entry.chunk_count]
        return [StoredChunk(chunk.offsets, chunk.tensor.shape, _item(chunk)) for chunk in of_key]


def entries_of_chunks(chunks: Sequence[ModelChunk]) -> Iterator[TensorEntry]:
    """What ``manifest_of_chunks`` says of tensors, without making one: that takes longer than a listing."""
    by_key = _by_key(chunks)
    source, row = _ModelChunks([chunk for of_key in by_key.values() for chunk in of_key]), 0
    for key, of_key in by_key.items():
        shape, dtype = ModelChunk.tensor_shape(of_key), of_key[0].tensor.dtype
        nbytes, count = tensor_nbytes(dtype, shape), len(of_key)
        yield TensorEntry(key, dtype, shape, nbytes, count, is_stored=True, row=row, box_at=0, source=source)
        row += count


def _item(chunk: ModelChunk) -> StorageInfo:
    nbytes = chunk.tensor.nbytes
    return StorageInfo(
        chunk.file, chunk.tensor.begin, nbytes, None, 0, nbytes, nbytes, chunk.checksums or b""
    )


def _by_key(chunks: Sequence[ModelChunk]) -> dict[str, list[ModelChunk]]:
    found: dict[str, list[ModelChunk]] = {}
    for chunk in chunks:
        found.setdefault(chunk.tensor.key, []).append(chunk)
    return found


def _entry(chunks: Sequence[ModelChunk]) -> TorchTensor:
    tensor, offsets, _, _ = chunks[0]
    if len(chunks) == 1 and not any(offsets):
        return _whole_entry(tensor.dtype, tensor.shape)
    boxes = [(chunk.offsets, chunk.tensor.shape) for chunk in chunks]
    return TorchTensor(TorchProperties(tensor.dtype), ModelChunk.tensor_shape(chunks), boxes)


@lru_cache(maxsize=4096)  # models repeat their shapes layer by layer
def _whole_entry(dtype: str, shape: tuple[int, ...]) -> TorchTensor:
    return TorchTensor(TorchProperties(dtype), shape, [((0,) * len(shape), shape)])
