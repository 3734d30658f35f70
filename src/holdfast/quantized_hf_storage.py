"""Models with block-wise quantised tensors, read as the numbers that they stand for, under torch's name."""

import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.futures import Future

from holdfast._io import pool
from holdfast._io.progress import ProgressTracker
from holdfast._known_methods import known_to_engine
from holdfast._storage.quantized_reading import (
    QuantizedTensor,
    Region,
    RegionReader,
    find_scales,
    show_numbers,
    slices,
)
from holdfast._storage.safetensors_metadata import read_model_metadata
from holdfast._torch_compat.torch_plugins import our_load_planner
from holdfast._torch_compat.torch_records import to_ours
from holdfast.errors import UsageError
from holdfast.hf_storage import HuggingFaceStorageReader, hand_over
from holdfast.metadata import Metadata, TensorStorageMetadata
from holdfast.planner import LoadPlan, LoadPlanner, ReadItem

__all__ = ["QuantizedHuggingFaceStorageReader"]


class QuantizedHuggingFaceStorageReader(HuggingFaceStorageReader):
    """Reads a quantised model, and gives its tensors as the numbers that they stand for.

    A tensor ``x.weight`` is quantised if there is ``x.weight_scale_inv``: each block of it is multiplied by
    its factor there. A tensor ``x_blocks`` is if there is ``x_scales``: MXFP4, two numbers in each byte. All
    others are read as they are. Numbers are made a strip at a time, so that a load takes tens of MiB besides
    the state.

    A subclass may replace ``_build_weight_scale_mapping``, ``_process_read_request`` and
    ``_read_quantized_tensor_with_block_alignment``, as that of torch's reader.

    Args:
        path: The folder.
        thread_count: How many tensors are read at a time.
        target_dtype: The dtype of the numbers.
        block_size: Rows and columns of a block of a matrix.
        **kwargs: As for ``HuggingFaceStorageReader``.
    """

    _hooks = ("_process_read_request", "_read_quantized_tensor_with_block_alignment")

    def __init__(
        self,
        path: str | os.PathLike[str],
        thread_count: int = 1,
        target_dtype: torch.dtype = torch.float32,
        block_size: int = 128,
        **kwargs: Any,
    ) -> None:
        super().__init__(path, thread_count, **kwargs)
        if block_size < 1:
            raise UsageError(f"block_size must be at least 1, not {block_size}")
        self.target_dtype = target_dtype
        self.block_size = block_size
        self._stored: Metadata | None = None
        # Subclasses of torch's reader know these by their names.
        self._weight_map: dict[str, str] = {}
        self._weight_scale_mapping: dict[str, str] = {}
        self._tensor_full_shapes: dict[str, torch.Size] = {}

    def read_metadata(self) -> Metadata:
        """What the files hold, with quantised tensors in the shape and dtype of their numbers."""
        self._load_quantization_metadata()
        assert self._stored is not None
        shown = show_numbers(self._stored, self._weight_scale_mapping, self.target_dtype)
        for key, entry in shown.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                self._tensor_full_shapes[key] = entry.size
        return self._as_asked_for(shown)

    def _load_quantization_metadata(self) -> None:
        """Find out what the files hold, and which tensors are quantised."""
        self._stored = read_model_metadata(self.store)
        places = self._stored.storage_data.items()
        self._build_weight_scale_mapping({index.fqn: info.place.relative_path for index, info in places})

    def _build_weight_scale_mapping(self, weight_map: dict[str, str]) -> None:
        """Find the quantised tensors, and the scales of each, among tensors and their files."""
        self._weight_map = weight_map
        self._weight_scale_mapping = find_scales(weight_map)

    def _is_tensor_quantized(self, tensor_fqn: str) -> bool:
        return tensor_fqn in self._weight_scale_mapping

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Read what the plan asks for, and hand it to the planner."""
        if self._goes_by_requests():
            return super().read_data(plan, planner)
        if self._stored is None:
            raise UsageError("read_metadata must be called before read_data")
        ours, into = to_ours(plan), our_load_planner(planner)
        self._metadata = self._stored
        quantised: list[ReadItem] = []
        others: list[ReadItem] = []
        for item in ours.items:
            (quantised if self._is_tensor_quantized(item.storage_index.fqn) else others).append(item)
        self._read(self.store, LoadPlan(others), into, self.context.progress)
        lock = threading.Lock()
        jobs = [partial(self._read_numbers, item, into, lock) for item in quantised]
        pool.run(jobs, threads=self.thread_count or 1)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_numbers(self, item: ReadItem, planner: LoadPlanner, lock: threading.Lock) -> None:
        assert self._stored is not None
        key, read = item.storage_index.fqn, RegionReader(self._stored, self._read_as_stored)
        with lock:
            target = planner.resolve_tensor(item)
        self._quantised(key, read.stored(key).size).read(item.storage_offsets, target.detach(), read)
        with lock:
            planner.commit_tensor(item, target)

    def _quantised(self, key: str, shape: Sequence[int]) -> QuantizedTensor:
        return QuantizedTensor(
            key, self._weight_scale_mapping[key], shape, self.target_dtype, self.block_size
        )

    def _read_as_stored(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        self._read(self.store, plan, planner, ProgressTracker(), threads=1)

    @known_to_engine
    def _process_read_request(self, f: Any, req: ReadItem, planner: LoadPlanner) -> None:
        """As that of ``HuggingFaceStorageReader``; a quantised tensor as its numbers."""
        if self._is_tensor_quantized(req.storage_index.fqn):
            hand_over(self._read_quantized_tensor_with_block_alignment(req, f), req, planner)
        else:
            super()._process_read_request(f, req, planner)

    @known_to_engine
    def _read_quantized_tensor_with_block_alignment(
        self, req: ReadItem, safetensor_file: Any
    ) -> torch.Tensor:
        """The numbers that a request asks for, out of a file that ``safe_open`` has opened."""
        key = req.storage_index.fqn
        stored = safetensor_file.get_slice(key)
        scales = self._scales(self._weight_scale_mapping[key], key, safetensor_file)
        numbers = torch.empty(tuple(req.lengths), dtype=self.target_dtype, device="cpu")

        def read(regions: dict[str, Region]) -> tuple[torch.Tensor, torch.Tensor]:
            of_stored, of_scales = regions.values()
            return stored[slices(*of_stored)], scales[slices(*of_scales)]

        self._quantised(key, stored.get_shape()).read(req.storage_offsets, numbers, read)
        return numbers

    def _scales(self, scale: str, key: str, file: Any) -> Any:
        name = self._weight_map[scale]
        if name == self._weight_map[key]:
            return file.get_tensor(scale)
        from safetensors import safe_open  # noqa: PLC0415 - only readers by requests need the package

        with safe_open(os.path.join(self.path, name), framework="pt") as other:
            return other.get_tensor(scale)
