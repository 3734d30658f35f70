"""Owns sharded tensors in staging: the parts that this rank holds, and the same tensor around copies of them.

Nothing here talks to another rank.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.tensor import DTensor

from holdfast._tensors.chunks import is_sharded
from holdfast._tensors.dtensors import local_tensor

__all__ = ["held_parts", "wrapped_again"]


def held_parts(value: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors whose memory is this rank's part of a tensor of any kind."""
    if not is_sharded(value):
        return [value]
    if isinstance(value, DTensor):
        return [local_tensor(value)]
    assert isinstance(value, ShardedTensor)
    return [shard.tensor for shard in value.local_shards()]


def wrapped_again(value: torch.Tensor, copies: Iterator[torch.Tensor]) -> torch.Tensor:
    """A tensor like ``value`` around the next of ``copies``, one for each of its ``held_parts``.

    Parameters become plain tensors; nothing requires a gradient.
    """
    if not is_sharded(value):
        return next(copies)
    if isinstance(value, DTensor):
        # from_local takes 10 times as long, and asks the mesh for things that a rank outside of it has not.
        spec = value._spec  # noqa: SLF001
        return DTensor(next(copies), spec, requires_grad=False)  # type: ignore[no-untyped-call]
    assert isinstance(value, ShardedTensor)
    return _sharded_again(value, copies)


def _sharded_again(value: ShardedTensor, copies: Iterator[torch.Tensor]) -> ShardedTensor:
    shards = [Shard(next(copies), _on_host(shard.metadata)) for shard in value.local_shards()]
    about = value.metadata()
    made: Any = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
        type(value), about.size, dtype=about.tensor_properties.dtype, requires_grad=False
    )
    # Whoever has this number takes it off torch's list of sharded tensors when it goes: it is the original's.
    noted = {name: fact for name, fact in vars(value).items() if name != "_sharded_tensor_id"}
    vars(made).update(noted, _local_shards=shards)
    return made  # type: ignore[no-any-return]


def _on_host(metadata: Any) -> Any:
    if metadata.placement is None or metadata.placement.device().type == "cpu":
        return metadata
    moved = copy.deepcopy(metadata)
    moved.placement._device = torch.device("cpu")  # noqa: SLF001
    return moved
