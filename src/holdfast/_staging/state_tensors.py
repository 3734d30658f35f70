"""The tensors of a state, taken apart into plain ones for staging, and put together again around the copies.

A sharded tensor counts as the parts that this rank holds. Nothing here talks to another rank.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.tensor import DTensor

from holdfast._staging.staging_copy import differs
from holdfast._staging.state_tree import IMMUTABLE, Memo, find_tensors, key_of
from holdfast._tensors.checkpointable import shards_wrapper, with_shards
from holdfast._tensors.chunks import is_sharded
from holdfast._tensors.dtensors import around, local_tensor
from holdfast._tensors.host import has_its_memory
from holdfast.errors import PlanError


class StateTensors:
    """The plain tensors of a state.

    Attributes:
        tensors: Each plain tensor of the state, and the local parts of each sharded one.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self._values = list(find_tensors(state).values())
        self.tensors = [part for value in self._values for part in _local_parts(value)]

    def memo(self, copies: Sequence[torch.Tensor]) -> Memo:
        """Map the identity of each tensor of the state to its copy, which is made of ``copies``.

        Args:
            copies: The copy of each tensor in ``tensors``, in the same order.
        """
        remaining = iter(copies)
        return {id(value): _marked_as(value, _rebuilt(value, remaining)) for value in self._values}

    def _key_of(self, number: int) -> str:
        owners = [value for value in self._values for _ in _local_parts(value)]
        return key_of(self._state, owners[number])

    def refuse_without_memory(self) -> None:
        """Raise PlanError if a tensor is on the meta device, or if its storage was freed."""
        for number, tensor in enumerate(self.tensors):
            if reason := _why_without_memory(tensor):
                key = self._key_of(number)
                raise PlanError(f"{key}: {reason}", key=key)

    def refuse_changed(self, copies: Sequence[torch.Tensor]) -> None:
        """Raise PlanError if a tensor and its copy differ in any bit."""
        for number, (source, copied) in enumerate(zip(self.tensors, copies, strict=True)):
            if _is_other_than(source, copied):
                key = self._key_of(number)
                raise PlanError(
                    f"{key}: the tensor was changed while it was staged: its copy has other values. Wait for "
                    "staging before the next step, and let no other thread write to the state meanwhile.",
                    key=key,
                )


def _local_parts(value: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors in whose memory this rank holds its part of a tensor of any kind."""
    if not is_sharded(value):
        return [value]
    if (wrapper := shards_wrapper(value)) is not None:
        return list(wrapper.local_shards())
    if isinstance(value, DTensor):
        return [local_tensor(value)]
    assert isinstance(value, ShardedTensor)
    return [shard.tensor for shard in value.local_shards()]


def _rebuilt(value: torch.Tensor, copies: Iterator[torch.Tensor]) -> torch.Tensor:
    """A tensor like ``value`` around the next of ``copies``, one for each of its local parts.

    Parameters become plain tensors; nothing requires a gradient.
    """
    if not is_sharded(value):
        return next(copies)
    if (wrapper := shards_wrapper(value)) is not None:
        made = with_shards(wrapper, [next(copies) for _ in wrapper.local_shards()])
        return around(value, made) if isinstance(value, DTensor) else made
    if isinstance(value, DTensor):
        return around(value, next(copies))
    assert isinstance(value, ShardedTensor)
    shards = [Shard(next(copies), _on_host(shard.metadata)) for shard in value.local_shards()]
    about = value.metadata()
    made = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
        type(value), about.size, dtype=about.tensor_properties.dtype, requires_grad=False
    )
    # The object that has this number removes it from torch's list of sharded tensors when it is dropped.
    noted = {name: fact for name, fact in vars(value).items() if name != "_sharded_tensor_id"}
    vars(made).update(noted, _local_shards=shards)
    return made


def _marked_as(value: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Give a copy the attributes that a program has set on the tensor, for its planner to see.

    Only numbers, text and the like: a tensor in an attribute may be as large as the state.
    """
    for name, mark in vars(value).items():
        if type(mark) in IMMUTABLE:
            setattr(made, name, mark)
    return made


def _on_host(metadata: Any) -> Any:
    if metadata.placement is None or metadata.placement.device().type == "cpu":
        return metadata
    moved = copy.deepcopy(metadata)
    moved.placement._device = torch.device("cpu")  # noqa: SLF001
    return moved


def _why_without_memory(tensor: torch.Tensor) -> str | None:
    if tensor.is_meta:
        return "a tensor on the meta device has no data to stage"
    if not has_its_memory(tensor):
        return "a tensor whose storage was freed or resized has no data to stage"
    return None


def _is_other_than(source: torch.Tensor, copied: torch.Tensor) -> bool:
    as_memory = source.is_cpu and not source.is_conj() and not source.is_neg()
    if not as_memory or source.stride() != copied.stride():
        source = source.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    return differs(source.data_ptr(), copied.data_ptr(), copied.numel() * copied.itemsize)
