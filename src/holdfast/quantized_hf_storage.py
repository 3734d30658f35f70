"""Models with block-wise quantised tensors, read as the numbers that they stand for, under torch's name."""

import os
import threading
from functools import partial
from typing import Any

import torch
from torch.futures import Future

from holdfast._io import pool
from holdfast._io.progress import ProgressTracker
from holdfast._known_methods import known_to_engine
from holdfast._storage.quantized_reading import QuantizedTensor, find_scales, show_numbers
from holdfast._storage.safetensors_metadata import read_model_metadata
from holdfast._torch_compat.torch_plugins import our_load_planner
from holdfast._torch_compat.torch_records import to_ours
from holdfast.errors import UsageError
from holdfast.hf_storage import HuggingFaceStorageReader
from holdfast.metadata import Metadata
from holdfast.planner import LoadPlan, LoadPlanner, ReadItem

__all__ = ["QuantizedHuggingFaceStorageReader"]


class QuantizedHuggingFaceStorageReader(HuggingFaceStorageReader):
    """Reads a quantised model, and gives its tensors as the numbers that they stand for.

    A tensor ``x.weight`` is quantised if there is ``x.weight_scale_inv``: each block of it is multiplied by
    its factor there. A tensor ``x_blocks`` is if there is ``x_scales``: MXFP4, two numbers in each byte. All
    others are read as they are. Numbers are made a strip at a time, so that a load takes tens of MiB besides
    the state.

    Args:
        path: The folder.
        thread_count: How many tensors are read at a time.
        target_dtype: The dtype of the numbers.
        block_size: Rows and columns of a block of a matrix.
        **kwargs: As for ``HuggingFaceStorageReader``.
    """

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
        self._scales: dict[str, str] = {}

    def read_metadata(self) -> Metadata:
        """What the files hold, with quantised tensors in the shape and dtype of their numbers."""
        self._stored = read_model_metadata(self.store)
        self._scales = find_scales(self._stored.state_dict_metadata)
        return self._as_asked_for(show_numbers(self._stored, self._scales, self.target_dtype))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Read what the plan asks for, and hand it to the planner."""
        if self._stored is None:
            raise UsageError("read_metadata must be called before read_data")
        ours, into = to_ours(plan), our_load_planner(planner)
        self._metadata = self._stored
        quantised = [item for item in ours.items if item.storage_index.fqn in self._scales]
        others = [item for item in ours.items if item.storage_index.fqn not in self._scales]
        self._read(self.store, LoadPlan(others), into, self.context.progress)
        lock = threading.Lock()
        jobs = [partial(self._read_numbers, item, into, lock) for item in quantised]
        pool.run(jobs, threads=self.thread_count or 1)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @known_to_engine
    def _process_read_request(self, f: Any, req: ReadItem, planner: LoadPlanner) -> None:
        """As that of ``HuggingFaceStorageReader``; a quantised tensor as its numbers."""
        if req.storage_index.fqn in self._scales:
            self._read_numbers(req, planner, threading.Lock())
        else:
            super()._process_read_request(f, req, planner)

    def _read_numbers(self, item: ReadItem, planner: LoadPlanner, lock: threading.Lock) -> None:
        assert self._stored is not None
        key = item.storage_index.fqn
        with lock:
            target = planner.resolve_tensor(item)
        tensor = QuantizedTensor(key, self._scales[key], self._stored, self.target_dtype, self.block_size)
        tensor.read(item.storage_offsets, target.detach(), self._read_as_stored)
        with lock:
            planner.commit_tensor(item, target)

    def _read_as_stored(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        self._read(self.store, plan, planner, ProgressTracker(), threads=1)
