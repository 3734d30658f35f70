"""Sharded safetensors files, as stock torch writes them, joined into the files of a model; torch's names."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from holdfast._io.progress import ProgressTracker
from holdfast._plan.global_plan import describe
from holdfast._storage.reading import read_items
from holdfast._storage.safetensors_metadata import read_model_metadata
from holdfast._storage.store_writer import DEFAULT_BUDGET
from holdfast.extension import ExtensionRegistry
from holdfast.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from holdfast.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from holdfast.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from holdfast.state_dict_saver import save

__all__ = ["consolidate_safetensors_files", "consolidate_safetensors_files_on_every_rank"]

logger = logging.getLogger(__name__)
_PIECE = 16 << 20
"""The most bytes that a thread reads before it writes them, unless a single row has more."""


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
    planner = _CopyPlanner(input_dir, mapping)
    save({}, storage_writer=writer, planner=planner, **options)


class _CopyPlanner(SavePlanner):
    """Saves what safetensors files hold: the coordinator deals their boxes out, and ranks read their own."""

    def __init__(self, input_dir: str | os.PathLike[str], mapping: Mapping[str, Any] | None) -> None:
        self._reader = HuggingFaceStorageReader(input_dir)
        self._mapping = mapping
        self._metadata = Metadata({})
        self._is_coordinator = False

    def set_up_planner(
        self,
        state_dict: dict[str, Any],  # noqa: ARG002 - there is none
        storage_meta: StorageMeta | None = None,  # noqa: ARG002
        is_coordinator: bool = False,
    ) -> None:
        self._metadata = read_model_metadata(self._reader.store)
        self._is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        if not self._is_coordinator:
            return SavePlan([])
        there = self._metadata.state_dict_metadata
        left = [key for key in there if self._mapping is not None and key not in self._mapping]
        if left:
            logger.warning("left out, as fqn_to_index_mapping does not name them: %s", ", ".join(left[:8]))
        wanted = there.keys() - set(left)
        return SavePlan([item for key in there if key in wanted for item in self._items(key)])

    def _items(self, key: str) -> Iterator[WriteItem]:
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        kind = WriteItemType.SHARD
        for number, chunk in enumerate(entry.chunks):
            for box in _pieces(chunk, entry.properties.dtype.itemsize):
                data = TensorWriteData(box, entry.properties, entry.size)
                yield WriteItem(MetadataIndex(key, box.offsets, number), kind, tensor_data=data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        items = [item for plan in all_plans for item in plan.items]
        return describe([SavePlan(part) for part in _deal(items, len(all_plans))])

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        data = write_item.tensor_data
        assert data is not None
        box, key = data.chunk, write_item.index.fqn
        tensor = torch.empty(box.sizes, dtype=data.properties.dtype)
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        chunk = next(chunk for chunk in entry.chunks if _contains(chunk, box))
        index, zeros = MetadataIndex(key, chunk.offsets), torch.Size([0] * len(box.sizes))
        inside = torch.Size([at - begin for at, begin in zip(box.offsets, chunk.offsets, strict=True)])
        line = ReadItem(LoadItemType.TENSOR, index, zeros, index, inside, box.sizes)
        read_items(
            self._reader.store,
            LoadPlan([line]),
            _IntoTensor(tensor),
            self._metadata,
            registry=ExtensionRegistry(),
            threads=1,
            budget=DEFAULT_BUDGET,
            verify=True,
            progress=ProgressTracker(),
        )
        return tensor


class _IntoTensor(LoadPlanner):
    """Hands out the memory of one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:  # noqa: ARG002 - there is one
        return self.tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


def _pieces(chunk: ChunkStorageMetadata, itemsize: int) -> Iterator[ChunkStorageMetadata]:
    """A chunk in slices along its first dimension that is longer than 1."""
    offsets, sizes = chunk.offsets, chunk.sizes
    cut = next((d for d, size in enumerate(sizes) if size > 1), None)
    if cut is None or sizes.numel() * itemsize <= _PIECE:
        yield chunk
        return
    rows = max(1, _PIECE // (sizes.numel() // sizes[cut] * itemsize))
    for start in range(0, sizes[cut], rows):
        count = min(rows, sizes[cut] - start)
        yield ChunkStorageMetadata(
            torch.Size([*offsets[:cut], offsets[cut] + start, *offsets[cut + 1 :]]),
            torch.Size([*sizes[:cut], count, *sizes[cut + 1 :]]),
        )


def _contains(chunk: ChunkStorageMetadata, box: ChunkStorageMetadata) -> bool:
    starts = zip(chunk.offsets, chunk.sizes, box.offsets, box.sizes, strict=True)
    return all(at <= begin and begin + length <= at + size for at, size, begin, length in starts)


def _deal(items: Sequence[WriteItem], count: int) -> list[list[WriteItem]]:
    """Neighbours together, in ``count`` portions of about the same number of bytes."""
    portions: list[list[WriteItem]] = [[] for _ in range(count)]
    nbytes = [_nbytes(item) for item in items]
    share, filled = max(1, sum(nbytes)) / count, 0
    for item, size in zip(items, nbytes, strict=True):
        portions[min(count - 1, int((filled + size / 2) / share))].append(item)
        filled += size
    return portions


def _nbytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
