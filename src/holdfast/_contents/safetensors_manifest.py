"""The tensors of safetensors files as a manifest of our own kind, made from headers."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from holdfast._format.description import TENSOR, column, concatenated, numbered
from holdfast._format.manifest import Manifest
from holdfast._format.safetensors import StoredTensor
from holdfast._io.blocks import BLOCK_SIZE


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
        chunks: The chunks, those of a key one after the other.
    """
    by_key: dict[str, list[ModelChunk]] = {}
    for chunk in chunks:
        by_key.setdefault(chunk.tensor.key, []).append(chunk)
    rows = [chunk for of_key in by_key.values() for chunk in of_key]
    shapes = [ModelChunk.tensor_shape(of_key) for of_key in by_key.values()]
    properties, used = numbered(
        (of_key[0].tensor.dtype, "strided", False, "contiguous_format", False) for of_key in by_key.values()
    )
    numbers = {name: number for number, name in enumerate(files)}
    sizes = [chunk.tensor.nbytes for chunk in rows]
    zeros = [0] * len(rows)
    items: dict[str, Any] = {
        "item_files": column([numbers[chunk.file] for chunk in rows], "I"),
        "item_offsets": column([chunk.tensor.begin for chunk in rows], "q"),
        "item_nbytes": column(sizes, "q"),
        "item_transforms": column(zeros, "I"),
        "item_payload_offsets": column(zeros, "q"),
        "item_payload_nbytes": column(sizes, "q"),
        "item_raw_nbytes": column(sizes, "q"),
        "item_blocks": column([len(chunk.checksums or b"") // 4 for chunk in rows], "I"),
        "item_wrap_checksums": column(zeros, "I"),
    }
    return Manifest(
        save_id="",
        created_ns=0,
        software="safetensors",
        world_size=1,
        block_size=BLOCK_SIZE,
        checkpoint_id=url,
        file_names=list(files),
        file_nbytes=column(files.values(), "q"),
        transforms=[[]],
        checksums=b"".join(chunk.checksums or b"" for chunk in rows),
        paths=[],
        containers=[],
        keys=list(by_key),
        kinds=bytes([TENSOR]) * len(by_key),
        properties=properties,
        tensor_properties=column(used, "I"),
        tensor_ndims=bytes(map(len, shapes)),
        tensor_shapes=column(concatenated(shapes), "q"),
        tensor_chunks=column(map(len, by_key.values()), "I"),
        chunk_offsets=column(concatenated(chunk.offsets for chunk in rows), "q"),
        chunk_lengths=column(concatenated(chunk.tensor.shape for chunk in rows), "q"),
        **items,
    )
