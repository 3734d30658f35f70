"""Loads the sharded optimizer state of FSDP's first version, without an optimizer that already has one."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from holdfast._engine.adapt import adapt_reader
from holdfast._names_elsewhere import names_of
from holdfast._nested_dict import unflatten_state_dict
from holdfast._storage.store_reader import StoreReader
from holdfast.default_planner import DefaultLoadPlanner
from holdfast.metadata import TensorStorageMetadata
from holdfast.planner import LoadPlanner
from holdfast.state_dict_loader import _load_state_dict
from holdfast.storage import StorageReader

__all__ = ["load_sharded_optimizer_state_dict"]

if not TYPE_CHECKING:
    __getattr__ = names_of(
        __name__, "_nested_dict", "metadata", "planner", "planner_helpers", "state_dict_loader", "utils"
    )


def load_sharded_optimizer_state_dict(
    model_state_dict: dict[str, Any],
    optimizer_key: str,
    storage_reader: StorageReader,
    planner: LoadPlanner | None = None,
) -> dict[str, Any]:
    """Load what a checkpoint has under ``optimizer_key``, each tensor sharded over all ranks.

    ``FSDP.optim_state_dict_to_load`` takes the result. For FSDP's second version, and for everything else,
    ``load`` fills the state of an optimizer directly.

    Args:
        model_state_dict: The model's sharded state dict. It tells whether the model is sharded twice.
        optimizer_key: The name of the optimizer's state in the checkpoint.
        storage_reader: What to read with.
        planner: What decides what is read; by default one that ignores what else the checkpoint has. Not used
            if the model is sharded twice.

    Returns:
        A nested state with the one key ``optimizer_key``.
    """
    if any(map(_is_sharded_twice, model_state_dict.values())):
        # Which part of each tensor is this rank's, only torch's own code for such models knows.
        from torch.distributed.checkpoint import optimizer as torchs  # noqa: PLC0415

        reader: Any = (
            storage_reader.for_torch() if isinstance(storage_reader, StoreReader) else storage_reader
        )
        return torchs.load_sharded_optimizer_state_dict(model_state_dict, optimizer_key, reader)
    metadata = adapt_reader(storage_reader).read_metadata()
    state = {
        key: _room_for(entry) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in metadata.state_dict_metadata.items()
        if metadata.planner_data[key][0] == optimizer_key
    }
    chosen = DefaultLoadPlanner(flatten_state_dict=False, strict=False) if planner is None else planner
    _load_state_dict(state, storage_reader, planner=chosen)
    return unflatten_state_dict(state, metadata.planner_data)


def _is_sharded_twice(value: Any) -> bool:
    return isinstance(value, ShardedTensor) and any(
        isinstance(shard.tensor, ShardedTensor) for shard in value.local_shards()
    )


def _room_for(entry: TensorStorageMetadata) -> torch.Tensor | ShardedTensor:
    """Memory for a tensor: whole if it is a single number, otherwise this rank's shard of it."""
    from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor  # noqa: PLC0415

    group = dist.distributed_c10d._get_default_group()  # noqa: SLF001
    kind = dist.distributed_c10d._get_pg_default_device(group).type  # noqa: SLF001
    devices = torch.get_device_module(kind)
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, devices.current_device())
    room = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
    if entry.size.numel() == 1:
        return room
    made: ShardedTensor = _create_chunk_sharded_tensor(
        room,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        num_devices_per_node=devices.device_count(),
        pg=group,
    )
    return made
