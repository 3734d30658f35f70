"""ShardedTensors whose shard is sharded again, as FSDP's first version makes them over tensor parallelism."""

import copy
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.remote_device import _remote_device

from holdfast._names_elsewhere import names_of
from holdfast._traverse import OBJ_PATH, set_element, traverse_state_dict
from holdfast.errors import PlanError
from holdfast.utils import _element_wise_add

if not TYPE_CHECKING:
    __getattr__ = names_of(__name__, "_traverse", "metadata", "utils")


def _flatten_sharded_tensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A nested state in which no shard is itself a ShardedTensor; the given state is not changed.

    A tensor that was sharded twice becomes one ShardedTensor that knows this rank's shard and where the
    others are. It can be saved and loaded into, and nothing else. ShardedTensors of which this rank has no
    shard are left out.

    Raises:
        PlanError: This rank has several shards of the inner tensor. It is a ValueError.
    """
    made: dict[str, Any] = {}

    def visit(path: OBJ_PATH, value: Any) -> None:
        if isinstance(value, ShardedTensor):
            shards = value.local_shards()
            if not shards:
                return
            if len(shards) == 1 and isinstance(shards[0].tensor, ShardedTensor):
                value = _sharded_once(value, shards[0], shards[0].tensor)
        set_element(made, path, value)

    traverse_state_dict(state_dict, visit)
    return made


def _sharded_once(whole: ShardedTensor, outer: Shard, inner: ShardedTensor) -> ShardedTensor:
    """The tensor ``whole``, of which this rank holds a shard of its shard ``outer``, sharded in one step."""
    if len(inner.local_shards()) != 1:
        raise PlanError(f"a sharded shard has {len(inner.local_shards())} shards on this rank, not one")
    (held,) = inner.local_shards()
    rank, device = dist.get_rank(), held.tensor.device
    # Which of the other ranks has a shard does not matter, if only it is another one.
    elsewhere = _remote_device(f"rank:{0 if rank else 1}/{device.type}")
    about = copy.deepcopy(whole.metadata())
    shards = [
        ShardMetadata(shard.shard_offsets, shard.shard_sizes, elsewhere)
        for shard in about.shards_metadata
        if shard.shard_offsets != outer.metadata.shard_offsets
    ]
    for part in inner.metadata().shards_metadata:
        offsets = _element_wise_add(outer.metadata.shard_offsets, part.shard_offsets)
        is_held = part.shard_offsets == held.metadata.shard_offsets
        place = _remote_device(f"rank:{rank}/{device}") if is_held else elsewhere
        shards.append(ShardMetadata(offsets, part.shard_sizes, place))
        if is_held:
            local = Shard(held.tensor, shards[-1])
    about.shards_metadata = shards
    return ShardedTensor._init_from_local_shards_and_global_metadata([local], about)  # noqa: SLF001
