"""Distributed checkpoints for PyTorch: never lost, never wrong, as fast as the hardware.

``import holdfast as dcp`` takes the place of ``import torch.distributed.checkpoint as dcp``.

Importing the package costs milliseconds: every name below is loaded on first use (PEP 562), so that
programs which only look at a checkpoint never pay for importing torch.
"""

import importlib

from holdfast._version import __version__

# To import typing takes milliseconds, in every process of an environment with HOLDFAST_INSTALL=1.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from holdfast import (
        api,
        conversion,
        default_planner,
        errors,
        extension,
        filesystem,
        format_utils,
        hf_storage,
        installation,
        logger,
        logging_handlers,
        manager,
        metadata,
        object_store,
        optimizer,
        planner,
        planner_helpers,
        progress_display,
        quantized_hf_storage,
        reader,
        records,
        resharding,
        staging,
        state_dict,
        state_dict_loader,
        state_dict_saver,
        stateful,
        storage,
        testing,
        torch_save_storage,
        training_state,
        utils,
    )
    from holdfast._fsspec_filesystem import FsspecReader, FsspecWriter
    from holdfast.conversion import ConversionResult, convert
    from holdfast.default_planner import DefaultLoadPlanner, DefaultSavePlanner
    from holdfast.errors import CheckpointError, CheckpointException
    from holdfast.filesystem import FileSystemReader, FileSystemWriter
    from holdfast.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
    from holdfast.installation import Installed, install, installed, uninstall
    from holdfast.load_result import LoadResult
    from holdfast.manager import CheckpointManager
    from holdfast.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorStorageMetadata,
    )
    from holdfast.object_store import ObjectStoreReader, ObjectStoreWriter
    from holdfast.optimizer import load_sharded_optimizer_state_dict
    from holdfast.per_rank import PerRank
    from holdfast.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
    from holdfast.quantized_hf_storage import QuantizedHuggingFaceStorageReader
    from holdfast.reader import CheckpointView, open  # noqa: A004 - for holdfast.open
    from holdfast.state_dict_loader import load, load_state_dict
    from holdfast.state_dict_saver import async_save, save, save_state_dict
    from holdfast.stateful import Stateful
    from holdfast.storage import StorageReader, StorageWriter
    from holdfast.torch_save_storage import TorchSaveReader
    from holdfast.training_state import TrainingState

__all__ = [
    "BytesStorageMetadata",
    "CheckpointError",
    "CheckpointException",
    "CheckpointManager",
    "CheckpointView",
    "ChunkStorageMetadata",
    "ConversionResult",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "FileSystemReader",
    "FileSystemWriter",
    "FsspecReader",
    "FsspecWriter",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "Installed",
    "LoadPlan",
    "LoadPlanner",
    "LoadResult",
    "Metadata",
    "MetadataIndex",
    "ObjectStoreReader",
    "ObjectStoreWriter",
    "PerRank",
    "QuantizedHuggingFaceStorageReader",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "Stateful",
    "StorageReader",
    "StorageWriter",
    "TensorStorageMetadata",
    "TorchSaveReader",
    "TrainingState",
    "WriteItem",
    "__version__",
    "api",
    "async_save",
    "conversion",
    "convert",
    "default_planner",
    "errors",
    "extension",
    "filesystem",
    "format_utils",
    "hf_storage",
    "install",
    "installation",
    "installed",
    "load",
    "load_sharded_optimizer_state_dict",
    "load_state_dict",
    "logger",
    "logging_handlers",
    "manager",
    "metadata",
    "object_store",
    "open",
    "optimizer",
    "planner",
    "planner_helpers",
    "progress_display",
    "quantized_hf_storage",
    "reader",
    "records",
    "resharding",
    "save",
    "save_state_dict",
    "staging",
    "state_dict",
    "state_dict_loader",
    "state_dict_saver",
    "stateful",
    "storage",
    "testing",
    "torch_save_storage",
    "training_state",
    "uninstall",
    "utils",
]

_HOME = {
    name: module
    for module, names in {
        "_fsspec_filesystem": ("FsspecReader", "FsspecWriter"),
        "conversion": ("ConversionResult", "convert"),
        "default_planner": ("DefaultLoadPlanner", "DefaultSavePlanner"),
        "errors": ("CheckpointError", "CheckpointException"),
        "filesystem": ("FileSystemReader", "FileSystemWriter"),
        "hf_storage": ("HuggingFaceStorageReader", "HuggingFaceStorageWriter"),
        "installation": ("Installed", "install", "installed", "uninstall"),
        "load_result": ("LoadResult",),
        "manager": ("CheckpointManager",),
        "metadata": (
            *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
            "TensorStorageMetadata",
        ),
        "object_store": ("ObjectStoreReader", "ObjectStoreWriter"),
        "optimizer": ("load_sharded_optimizer_state_dict",),
        "per_rank": ("PerRank",),
        "planner": ("LoadPlan", "LoadPlanner", "ReadItem", "SavePlan", "SavePlanner", "WriteItem"),
        "quantized_hf_storage": ("QuantizedHuggingFaceStorageReader",),
        "reader": ("CheckpointView", "open"),
        "state_dict_loader": ("load", "load_state_dict"),
        "state_dict_saver": ("async_save", "save", "save_state_dict"),
        "stateful": ("Stateful",),
        "storage": ("StorageReader", "StorageWriter"),
        "torch_save_storage": ("TorchSaveReader",),
        "training_state": ("TrainingState",),
    }.items()
    for name in names
}
"""The module that each public name lives in."""

_MODULES = frozenset(name for name in __all__ if name not in _HOME and name != "__version__") | {
    *("_consolidate_hf_safetensors", "_dedup_save_plans", "_dedup_tensors", "_extension", "_hf_utils"),
    *("_nested_dict", "_sharded_tensor_utils", "_state_dict_stager", "_storage_utils", "_traverse"),
}
"""What ``holdfast.<module>`` gives without an import of its own, as torch's package does."""


def __getattr__(name: str) -> "Any":
    if name in _HOME:
        value = getattr(importlib.import_module(f"holdfast.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"holdfast.{name}")
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
