"""The planners that save and load unless the caller brings others, under torch's names."""

from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from holdfast._plan.global_plan import find_problems
from holdfast._planners.empty_state_planner import EmptyStateDictLoadPlanner
from holdfast._planners.load_planner import (
    DefaultLoadPlanner,
    create_default_global_load_plan,
    create_default_local_load_plan,
)
from holdfast._planners.save_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from holdfast.metadata import ChunkStorageMetadata, Metadata, TensorProperties, TensorStorageMetadata
from holdfast.planner import SavePlan

__all__ = [
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "EmptyStateDictLoadPlanner",
    "create_default_global_load_plan",
    "create_default_global_save_plan",
    "create_default_local_load_plan",
    "create_default_local_save_plan",
]

# Programs that load without a state to load into know it by this name.
_EmptyStateDictLoadPlanner = EmptyStateDictLoadPlanner


def _create_default_local_metadata(state_dict: dict[str, Any]) -> Metadata:
    """The metadata that a save of a flat state by this rank alone would have; torch has this function."""
    plan = create_default_local_save_plan(state_dict, is_coordinator=True)
    _, metadata = create_default_global_save_plan([plan])
    for key, value in state_dict.items():
        if isinstance(value, ShardedTensor):
            # It knows where every shard is, also if this rank has none.
            whole = value.metadata()
            metadata.state_dict_metadata[key] = TensorStorageMetadata(
                properties=TensorProperties(dtype=whole.tensor_properties.dtype),
                size=torch.Size(whole.size),
                chunks=[
                    ChunkStorageMetadata(torch.Size(shard.shard_offsets), torch.Size(shard.shard_sizes))
                    for shard in whole.shards_metadata
                ],
            )
    return metadata


def _validate_global_plan(global_plan: list[SavePlan], metadata: Metadata) -> bool:  # noqa: ARG001
    """Whether the chunks of each tensor cover it exactly once; torch has this function."""
    return not find_problems(metadata, whole=True)
