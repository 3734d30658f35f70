"""Models as safetensors files, as Hugging Face's libraries read and write them, under torch's names."""

import contextlib
import importlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.futures import Future

from holdfast._format.safetensors_index import INDEX, parse_size
from holdfast._hf_utils import _HFStorageInfo
from holdfast._io import pool
from holdfast._io.page_cache import PageCache
from holdfast._known_methods import known_to_engine
from holdfast._names_elsewhere import names_of
from holdfast._plan.dtype_fit import float_dtype
from holdfast._plan.key_renaming import Rename, renaming
from holdfast._ranks.exchange import Exchange
from holdfast._storage.item_places import StorageData
from holdfast._storage.quantized_reading import slices
from holdfast._storage.safetensors_layout import ExportOptions
from holdfast._storage.safetensors_metadata import read_model_metadata
from holdfast._storage.safetensors_writer import SafetensorsWriter
from holdfast._storage.store_writer import DEFAULT_BUDGET
from holdfast._torch_compat.torch_plugins import our_load_planner
from holdfast._torch_compat.torch_records import to_ours
from holdfast.errors import IncompleteCheckpointError, PlanError, UsageError
from holdfast.filesystem import FileSystemReader, FileSystemWriter
from holdfast.metadata import Metadata
from holdfast.planner import LoadPlan, LoadPlanner, ReadItem

__all__ = ["HuggingFaceStorageReader", "HuggingFaceStorageWriter"]

if not TYPE_CHECKING:
    __getattr__ = names_of(
        __name__, "_consolidate_hf_safetensors", "_hf_utils", "filesystem", "metadata", "planner", "storage"
    )

_metadata_fn = INDEX


class HuggingFaceStorageWriter(SafetensorsWriter, FileSystemWriter):
    """Writes a model as safetensors files, which transformers, vLLM and stock torch read.

    The ranks write the final files together, in one pass: each its shards, at their places. Where files can
    only be written from front to back, as in object stores, each file is written by one rank, and the others
    send it their shards. No file is read again, and no folder of shards is left. Until the save is complete
    the folder's old model is there, whole; after it, the new one. Values that are not tensors are refused.

    Beside the files lies ``.holdfast.safetensors.checksums``, by which Holdfast checks every byte that it
    reads of them. Other libraries ignore it.

    Args:
        path: The folder, made if it does not exist; or a URL, such as ``s3://bucket/model``.
        fqn_to_index_mapping: The file of each tensor: its number from 1 on, or its name, as the
            ``weight_map`` of an index has it. Every tensor of the state must be in it, and nothing else. By
            default there is one file, ``model-00001-of-00001.safetensors``.
        thread_count: How many threads of each rank write.
        save_distributed: Without ``enable_consolidation``, headers say besides where each tensor begins in
            the whole one (at its beginning), for programs that join shards. Sharded tensors are always
            written by the ranks that have them, and a state that only one rank has by that rank.
        enable_consolidation: As torch's. The files are always whole.
        thread_count_consolidation: Accepted for compatibility: there is no second pass.
        token: Accepted for compatibility; places that need one are not reached by this class.
        max_shard_size: The most bytes of tensors in a file: a number, or text such as ``"5GB"``. A model that
            fits into one is ``model.safetensors``, without an index, as transformers has it.
        dtype: Cast floating-point tensors to this floating-point dtype on the way out, a few MiB at a time.
            Other tensors stay as they are.
        rename: What keys are called in the files: a function of the key, or a dict with new names for some.
            ``fqn_to_index_mapping`` has the new names.
        memory_budget: The most bytes of memory taken besides the state.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fqn_to_index_mapping: Mapping[str, int | str] | None = None,
        thread_count: int = 1,
        save_distributed: bool = False,
        enable_consolidation: bool = False,
        thread_count_consolidation: int = 1,
        *,
        token: str | None = None,
        max_shard_size: int | str | None = None,
        dtype: torch.dtype | str | None = None,
        rename: Rename | None = None,
        memory_budget: int = DEFAULT_BUDGET,
    ) -> None:
        # Programs that only import safetensors read the files with safetensors.torch, which torch imports.
        with contextlib.suppress(ImportError):
            importlib.import_module("safetensors.torch")
        FileSystemWriter.__init__(self, path, thread_count=thread_count, memory_budget=memory_budget)
        if fqn_to_index_mapping is not None and max_shard_size is not None:
            raise UsageError("give either fqn_to_index_mapping or max_shard_size: both divide the tensors")
        self.token = token
        self.fqn_to_index_mapping = fqn_to_index_mapping
        self.save_distributed = save_distributed
        self.enable_consolidation = enable_consolidation
        self.thread_count_consolidation = thread_count_consolidation
        self.options = ExportOptions(
            fqn_to_index_mapping,
            None if max_shard_size is None else parse_size(max_shard_size),
            float_dtype(dtype),
            None if rename is None else renaming(rename),
            as_shards=save_distributed and not enable_consolidation,
        )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_split_by_storage_plan" in vars(cls):
            raise UsageError(
                f"{cls.__name__} replaces _split_by_storage_plan, which is not called here: say which tensor "
                "lies in which file with fqn_to_index_mapping or max_shard_size"
            )

    @property
    def metadata_path(self) -> str:
        """The name of the index."""
        return INDEX


class HuggingFaceStorageReader(FileSystemReader):
    """Reads safetensors files, whoever wrote them: Holdfast, transformers, safetensors, torch.

    ``model.safetensors.index.json`` decides which file has which tensor. Without an index,
    ``model.safetensors`` is read, or else all safetensors files of the folder. Only the needed bytes are
    read. Files that Holdfast wrote are checked; others have no checksums.

    Subclasses may replace ``_process_read_request``, and may return ``_HFStorageInfo`` records of their own
    from ``read_metadata``, as those of torch's reader do. Then each file is opened with
    ``safetensors.safe_open``, and bytes are not compared with checksums.

    Args:
        path: The folder, or a URL.
        thread_count: How many threads read; 4 of a local folder by default.
        token: Accepted for compatibility; places that need one are not reached by this class.
        memory_budget: As in ``FileSystemReader``.
        verify: As in ``FileSystemReader``.
        share_reads: As in ``FileSystemReader``.
        page_cache: As in ``FileSystemReader``.
    """

    _hooks: tuple[str, ...] = ("_process_read_request",)

    def __init__(
        self,
        path: str | os.PathLike[str],
        thread_count: int | None = None,
        *,
        token: str | None = None,
        memory_budget: int = DEFAULT_BUDGET,
        verify: bool = True,
        share_reads: bool = True,
        page_cache: PageCache = "auto",
    ) -> None:
        super().__init__(
            path,
            thread_count=thread_count,
            memory_budget=memory_budget,
            verify=verify,
            share_reads=share_reads,
            page_cache=page_cache,
        )
        self.token = token

    @known_to_engine
    def read_metadata(self) -> Metadata:
        """What the files hold; reads the index and the headers of the files.

        Raises:
            CheckpointNotFoundError: There is no safetensors file.
            IncompleteCheckpointError: A file, a tensor, or a part of one is missing.
            IntegrityError: A file is damaged.
        """
        return self._as_asked_for(read_model_metadata(self.store))

    @known_to_engine
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Read what the plan asks for, and hand it to the planner."""
        if not self._goes_by_requests():
            return super().read_data(plan, planner)
        ours, into = to_ours(plan), our_load_planner(planner)
        files: dict[str, list[ReadItem]] = {}
        for item in ours.items:
            name = self.storage_data[item.storage_index].relative_path
            files.setdefault(os.path.join(self.path, name), []).append(item)
        jobs = [partial(self._process_file, file, items, into) for file, items in files.items()]
        pool.run(jobs, threads=self.thread_count or 1)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_data_together(
        self, finish_plan: Callable[[], LoadPlan], planner: LoadPlanner, exchange: Exchange
    ) -> Callable[[], None]:
        """As that of ``FileSystemReader``; requests are served by each rank for itself."""
        if self._goes_by_requests():
            return lambda: self.read_data(finish_plan(), planner).wait()
        return super().read_data_together(finish_plan, planner, exchange)

    def _goes_by_requests(self) -> bool:
        """Whether a subclass serves requests itself, or records do not tell where bytes are."""
        if not all(getattr(getattr(self, name), "is_known_to_engine", False) for name in self._hooks):
            return True
        stored = self.storage_data or {}
        if isinstance(stored, StorageData) and not stored.is_open:
            return False
        return any(isinstance(info, _HFStorageInfo) and info.place is None for info in stored.values())

    @known_to_engine
    def _process_read_request(self, f: Any, req: ReadItem, planner: LoadPlanner) -> None:
        """Copy what one line of a plan asks for out of a file that ``safe_open`` has opened."""
        key, box = req.storage_index.fqn, slices(req.storage_offsets[: len(req.lengths)], req.lengths)
        hand_over(f.get_slice(key)[box] if box else f.get_tensor(key), req, planner)

    def _process_file(self, file: str, items: list[ReadItem], planner: LoadPlanner) -> None:
        from safetensors import safe_open  # noqa: PLC0415 - only such subclasses need the package

        try:
            opened = safe_open(filename=file, framework="pt")
        except FileNotFoundError as error:
            raise IncompleteCheckpointError(
                f"{items[0].storage_index.fqn}: there is no file {file}", path=file
            ) from error
        with opened as f:
            for item in items:
                self._process_read_request(f, item, planner)


def hand_over(tensor: torch.Tensor, req: ReadItem, planner: LoadPlanner) -> None:
    """Give a planner the values that it asked for."""
    target = planner.resolve_tensor(req).detach()
    if target.shape != tensor.shape:
        key = req.storage_index.fqn
        raise PlanError(
            f"{key}: the file has a part of shape {list(tensor.shape)}, and the plan has room for "
            f"{list(target.shape)}",
            key=key,
        )
    target.copy_(tensor)
    planner.commit_tensor(req, target)
