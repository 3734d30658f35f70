"""Sharded safetensors files, as stock torch writes them, joined into the files of a model; torch's names."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from holdfast._contents.safetensors_manifest import ModelChunk
from holdfast._conversion.copy_planner import CopyPlanner
from holdfast._conversion.entry_stream import EntryStream
from holdfast._conversion.selection import select
from holdfast._conversion.sources import open_target
from holdfast._format.safetensors import StoredTensor
from holdfast._geometry import row_major_strides
from holdfast._hf_utils import (
    DEFAULT_EXTRA_METADATA_KEY,
    DTYPE_KEY,
    SAVED_OFFSETS_KEY,
    SHAPE_KEY,
    _get_dcp_custom_metadata,
    _get_dtype,
)
from holdfast._names_elsewhere import names_of
from holdfast._plan.global_plan import describe
from holdfast._storage.safetensors_writing import ChunkPlace
from holdfast._storage.writing import deal_neighbours
from holdfast.hf_storage import HuggingFaceStorageWriter
from holdfast.metadata import Metadata, StorageMeta
from holdfast.planner import SavePlan, WriteItem
from holdfast.state_dict_saver import save

__all__ = ["consolidate_safetensors_files", "consolidate_safetensors_files_on_every_rank"]

if not TYPE_CHECKING:
    __getattr__ = names_of(__name__, "_hf_utils")

logger = logging.getLogger(__name__)


def consolidate_safetensors_files(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    fqn_to_index_mapping: Mapping[str, int | str] | None = None,
    num_threads: int = 1,
) -> None:
    """Join safetensors files that have parts of tensors into the files of a model; called by one process.

    Works on every dtype, and takes tens of MiB of memory for each thread. The model that ``output_dir`` has
    is there, whole, until the new one is. To save a model there is no need for this: HuggingFaceStorageWriter
    writes the final files at once.

    Args:
        input_dir: The folder with the parts, or with the files of a model.
        output_dir: The folder for the files, made if it does not exist.
        fqn_to_index_mapping: The file of each tensor, as for ``HuggingFaceStorageWriter``. Tensors that it
            does not name are left out. None for one file with all tensors.
        num_threads: How many threads read and write.

    Raises:
        CheckpointError: Parts are missing or damaged, or the mapping names a tensor that is not there.
    """
    _consolidate(input_dir, output_dir, fqn_to_index_mapping, num_threads, no_dist=True)


def consolidate_safetensors_files_on_every_rank(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    fqn_to_index_mapping: Mapping[str, int | str] | None = None,
    num_threads: int = 1,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """As ``consolidate_safetensors_files``, called on every rank: the ranks share the bytes equally.

    Args:
        input_dir: As there. All ranks must see it.
        output_dir: As there. All ranks must see it.
        fqn_to_index_mapping: As there.
        num_threads: As there, for each rank.
        process_group: The ranks; the default group if it is not given. Without any group one process does
            all of it.
    """
    _consolidate(input_dir, output_dir, fqn_to_index_mapping, num_threads, process_group=process_group)


def _consolidate(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    mapping: Mapping[str, int | str] | None,
    num_threads: int,
    **options: Any,
) -> None:
    writer = HuggingFaceStorageWriter(output_dir, mapping, num_threads)
    planner = _JoiningPlanner(input_dir, mapping)
    save({}, storage_writer=writer, planner=planner, **options)


class _JoiningPlanner(CopyPlanner):
    """Saves what safetensors files hold: the coordinator deals their boxes out, and ranks read their own."""

    def __init__(self, input_dir: str | os.PathLike[str], mapping: Mapping[str, Any] | None) -> None:
        self._input_dir = input_dir
        self._mapping = mapping
        self._is_coordinator = False

    def set_up_planner(
        self,
        state_dict: dict[str, Any],  # noqa: ARG002 - there is none
        storage_meta: StorageMeta | None = None,  # noqa: ARG002
        is_coordinator: bool = False,
    ) -> None:
        source = open_target(self._input_dir, "safetensors")
        taken = select(source, keys=None, rename=None, dtype=None, with_kept_values=True)
        left = [key for key in taken.entries if self._mapping is not None and key not in self._mapping]
        for key in left:
            del taken.entries[key]
        if left and is_coordinator:
            logger.warning("left out, as fqn_to_index_mapping does not name them: %s", ", ".join(left[:8]))
        super().__init__(EntryStream(source, taken), in_pieces=True)
        self._is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        return super().create_local_plan() if self._is_coordinator else SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        items = [item for plan in all_plans for item in plan.items]
        portions = deal_neighbours(items, list(map(_nbytes, items)), len(all_plans))
        return describe(list(map(SavePlan, portions)))


def _nbytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _calculate_max_contiguous_elements(
    indices: Sequence[int], sub_tensor_shape: Sequence[int], tensor_shape: Sequence[int]
) -> int:
    """How many elements of a part, from ``indices`` on, follow each other in the memory of its tensor.

    Raises:
        ValueError: There are no such elements.
    """
    if not indices or not sub_tensor_shape or not tensor_shape:
        raise ValueError("Input lists cannot be empty: a part has at least one dimension")
    if not len(indices) == len(sub_tensor_shape) == len(tensor_shape):
        raise ValueError(
            f"All input lists must have the same length, not {len(indices)}, {len(sub_tensor_shape)} and "
            f"{len(tensor_shape)}"
        )
    for dimension, (at, length, size) in enumerate(zip(indices, sub_tensor_shape, tensor_shape, strict=True)):
        if at >= length:
            raise ValueError(
                f"Index {at} at dimension {dimension} is out of bounds for sub-tensor shape "
                f"{sub_tensor_shape}"
            )
        if length > size:
            raise ValueError(
                f"Sub-tensor dimension {length} at position {dimension} exceeds tensor dimension {size}"
            )
    place = ChunkPlace.of(0, tensor_shape, [0] * len(tensor_shape), sub_tensor_shape, 1)
    position = sum(map(int.__mul__, indices, row_major_strides(sub_tensor_shape)))
    in_run = place.run - position % place.run
    # In the middle of a row only the rest of the row is meant, also where the next row follows it.
    return in_run if not indices[-1] else min(in_run, sub_tensor_shape[-1] - indices[-1])


def _write_sub_tensor_to_file_optimized(
    full_tensor_mv: memoryview,
    sub_tensor_bytes: bytes,
    element_size: int,
    tensor_shape: Sequence[int],
    sub_tensor_offsets: Sequence[int],
    sub_tensor_shape: Sequence[int],
) -> None:
    """Put the elements of a part to their places in the memory of its tensor."""
    place = ChunkPlace.of(0, tensor_shape, sub_tensor_offsets, sub_tensor_shape, element_size)
    for at, run in place.cut(0, memoryview(sub_tensor_bytes)):
        full_tensor_mv[at : at + len(run)] = run


@dataclass
class _FqnData:
    """One tensor of a file that is made: where its bytes begin, its shape, and its dtype."""

    offset_in_file: int = 0
    shape_in_file: list[int] = field(default_factory=list)
    dtype_size: int = 0
    dtype_str: str = ""


@dataclass
class _OutputFileData:
    """A file that is made: the bytes of its header, and its tensors."""

    metadata_size: int = 0
    fqn_data: dict[str, Any] = field(default_factory=dict)


@dataclass
class _InputFileData:
    """A file with parts of tensors: the bytes of its header, and what it says."""

    metadata_size: int = 0
    metadata: Any = None


def _parse_input_metadata(
    input_files_data: Mapping[str, _InputFileData], output_files_data: Mapping[str, _OutputFileData]
) -> None:
    """Note the shape and dtype of each tensor of the files that are made, found from its parts.

    Raises:
        ValueError: A file does not say which parts it has.
    """
    chunks: dict[str, list[ModelChunk]] = {}
    for name, file in input_files_data.items():
        noted = _get_dcp_custom_metadata(file.metadata)
        if not noted:
            raise ValueError(f"{name} does not say which parts of tensors it has: it is no shard of a model")
        for key in file.metadata.keys() - {DEFAULT_EXTRA_METADATA_KEY}:
            entry = file.metadata[key]
            tensor = StoredTensor(key, entry[DTYPE_KEY], tuple(entry[SHAPE_KEY]))
            part = ModelChunk(tensor, tuple(noted[key][SAVED_OFFSETS_KEY]), name, None)
            chunks.setdefault(key, []).append(part)
    for made in output_files_data.values():
        for key in made.fqn_data.keys() & chunks.keys():
            dtype, shape = chunks[key][0].tensor.dtype, ModelChunk.tensor_shape(chunks[key])
            made.fqn_data[key] = _FqnData(0, list(shape), _get_dtype(dtype).itemsize, dtype)
