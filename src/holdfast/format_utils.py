"""Checkpoints and files of ``torch.save``, under torch's names; :func:`holdfast.convert` does more."""

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from holdfast._names_elsewhere import names_of
from holdfast._torch_compat.torch_records import to_ours
from holdfast.conversion import convert
from holdfast.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from holdfast.errors import PlanError, UsageError
from holdfast.metadata import (
    STATE_DICT_TYPE,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast.planner_helpers import _create_chunk_list
from holdfast.state_dict_loader import _load_state_dict
from holdfast.torch_save_storage import TorchSaveReader

__all__ = [
    "BroadcastingTorchSaveReader",
    "DynamicMetaLoadPlanner",
    "TorchSaveReader",
    "_EmptyStateDictLoadPlanner",
    "_load_state_dict",
    "dcp_to_torch_save",
    "torch_save_to_dcp",
]

if not TYPE_CHECKING:
    __getattr__ = names_of(
        __name__,
        "_nested_dict",
        "filesystem",
        "metadata",
        "planner",
        "state_dict_saver",
        "storage",
        "torch.distributed._shard._utils",
    )


class BroadcastingTorchSaveReader(TorchSaveReader):
    """Reads a file of ``torch.save`` on all ranks, each what it needs; see :class:`TorchSaveReader`.

    What several ranks need is read once, and passed on. No rank holds the whole file.

    Args:
        checkpoint_id: The file. Not needed if it is given to ``load``.
        coordinator_rank: Accepted for compatibility.
        **options: As for :class:`TorchSaveReader`.

    Example:
        >>> holdfast.load({"model": model}, storage_reader=BroadcastingTorchSaveReader("model.pt"))
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        coordinator_rank: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(checkpoint_id, **options)
        self.coordinator_rank = coordinator_rank


class DynamicMetaLoadPlanner(DefaultLoadPlanner):
    """Loads from a storage that may not know what it holds: then it holds what the state has.

    The readers of Holdfast know. With them it is :class:`DefaultLoadPlanner`, and loads every kind of value.
    With one whose metadata is empty, the state must consist of tensors.
    """

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,  # type: ignore[type-arg]
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the state, and describe it if the storage does not say what it holds.

        Raises:
            UsageError: The storage does not say what it holds, and a value of the state is not a tensor.
        """
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if metadata is None or not to_ours(metadata).state_dict_metadata:
            self.metadata = Metadata({key: _described(key, value) for key, value in self.state_dict.items()})


def _described(key: str, value: Any) -> TensorStorageMetadata:
    try:
        chunks = _create_chunk_list(value)
    except PlanError as error:
        raise UsageError(
            f"{key}: the storage does not say what it holds, so that only tensors can be loaded from it",
            key=key,
        ) from error
    return TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.size(), chunks)


def dcp_to_torch_save(
    dcp_checkpoint_dir: str | os.PathLike[str],
    torch_save_path: str | os.PathLike[str],
    *,
    allow_pickle: bool = False,
    safe_globals: Iterable[Callable[..., Any] | type] = (),
) -> None:
    """Convert a checkpoint, ours or torch's, into a file of ``torch.save``; called by one process.

    Memory is bounded as for ``convert``. A file of that name is replaced, once the new one is complete
    and checked.

    Args:
        dcp_checkpoint_dir: The checkpoint's folder, or its URL.
        torch_save_path: The file, or its URL.
        allow_pickle: As for :func:`load`.
        safe_globals: As for :func:`load`.

    Raises:
        CheckpointError: As :func:`holdfast.convert`.
    """
    convert(
        dcp_checkpoint_dir,
        torch_save_path,
        to="torch_save",
        overwrite=True,
        allow_pickle=allow_pickle,
        safe_globals=safe_globals,
    )


def torch_save_to_dcp(
    torch_save_path: str | os.PathLike[str],
    dcp_checkpoint_dir: str | os.PathLike[str],
    *,
    allow_pickle: bool = False,
    safe_globals: Iterable[Callable[..., Any] | type] = (),
) -> None:
    """Convert a file of ``torch.save`` into a checkpoint, which stock torch reads too; called by one process.

    Nothing that the file names is run. Memory is bounded as for ``convert``. A checkpoint that is in
    the folder is replaced, once the new one is complete.

    Args:
        torch_save_path: The file, or its URL.
        dcp_checkpoint_dir: The folder, or its URL.
        allow_pickle: Import and run what the file names.
        safe_globals: As for :func:`load`.

    Raises:
        CheckpointError: As :func:`holdfast.convert`.
    """
    convert(
        torch_save_path,
        dcp_checkpoint_dir,
        to="holdfast",
        overwrite=True,
        allow_pickle=allow_pickle,
        safe_globals=safe_globals,
    )
