"""Sharded tensors made whole, whole tensors shared out to ranks, and trees of values with tensors in them."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate

from holdfast._model_state.state_dict_options import StateDictOptions
from holdfast._tensors.dtensors import empty_shards, held_pieces, memory_of_piece, narrowed
from holdfast._tensors.tensor_parts import is_made_of_parts, put_together, take_apart


def changed_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested dicts, lists and tuples, with every other value changed by ``change``."""
    if isinstance(tree, dict):
        made = {} if type(tree) is dict else copy.copy(tree)
        for key, value in tree.items():
            made[key] = changed_leaves(value, change)
        return made
    if type(tree) is list:
        return [changed_leaves(value, change) for value in tree]
    if isinstance(tree, tuple) and not isinstance(tree, torch.Size):
        values = [changed_leaves(value, change) for value in tree]
        return tuple(values) if type(tree) is tuple else type(tree)(*values)
    return change(tree)


def is_left_to_rank0(options: StateDictOptions) -> bool:
    """Whether this rank gets an empty state dict, because rank 0 gets it all."""
    only_rank0 = options.full_state_dict and options.cpu_offload
    return only_rank0 and dist.is_available() and dist.is_initialized() and dist.get_rank() != 0


def delivered(value: Any, options: StateDictOptions) -> Any:
    """A value, which is no container, in the form that the options ask for.

    If it is a sharded tensor that is gathered, every rank that holds a part must call this. A rank that gets
    nothing in the end takes part and drops the tensor at once.
    """
    if not isinstance(value, torch.Tensor):
        return value
    whole = gathered(value) if options.full_state_dict else value
    if is_left_to_rank0(options):
        return None
    return whole.to("cpu") if options.cpu_offload else whole


def gathered(value: torch.Tensor) -> torch.Tensor:
    """The whole tensor, on every rank that holds a part; a plain tensor is returned as it is."""
    if isinstance(value, ShardedTensor):
        return _gathered_shards(value)
    if not isinstance(value, DTensor):
        return value
    mesh_kind = value.device_mesh.device_type
    on_mesh: Any = value if value.device.type == mesh_kind else value.to(mesh_kind)
    whole: torch.Tensor = on_mesh.full_tensor()
    return whole


def _gathered_shards(value: ShardedTensor) -> torch.Tensor:
    """Every owner of a shard sends it to the others, one after the other."""
    group = value._process_group  # noqa: SLF001
    mine = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in value.local_shards()}
    properties = value.metadata().tensor_properties
    whole: torch.Tensor | None = None
    for shard in value.metadata().shards_metadata:
        assert shard.placement is not None
        kind = shard.placement.device().type
        if whole is None:
            whole = torch.empty(value.size(), dtype=properties.dtype, device=kind)
        held = mine.get(tuple(shard.shard_offsets))
        if held is None:
            held = torch.empty(shard.shard_sizes, dtype=properties.dtype, device=kind)
        sent = held.detach().contiguous()
        dist.broadcast(sent, src=shard.placement.rank() or 0, group=group)
        narrowed(whole, shard.shard_offsets, torch.Size(shard.shard_sizes)).copy_(sent)
    assert whole is not None
    return whole


def fill(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of ``whole`` into ``target``, which has the same shape."""
    if not isinstance(target, DTensor):
        target.detach().copy_(whole)
        return
    for piece in held_pieces(target):
        memory_of_piece(target, piece).copy_(narrowed(whole, piece.offsets, piece.lengths))


def copied(value: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A copy, on ``device``. If a tensor is made of others these are copied: its class may know no copy."""
    if isinstance(value, DTensor) or not is_made_of_parts(value):
        return value.detach().to(device or value.device, copy=True)
    parts = take_apart(value, "a state dict")
    return put_together(value.detach(), parts.with_parts(lambda part: copied(part, device)))


def shared_out(whole: torch.Tensor, like: DTensor, device: torch.device) -> DTensor:
    """A tensor of this rank with the values of ``whole`` and the layout of ``like``, on ``device``."""
    made = empty_shards(like, device, whole.dtype)
    fill(made, whole)
    return made


def replicated(whole: torch.Tensor, like: DTensor) -> DTensor:
    """A copy of ``whole`` on every rank of the mesh of ``like``."""
    mesh = like.device_mesh
    return DTensor.from_local(
        whole.to(like.device, copy=True), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
