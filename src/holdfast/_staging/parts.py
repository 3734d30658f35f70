"""Owns the plain tensors of a state, and which value each is part of."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from holdfast._staging.copying import differs
from holdfast._staging.sharded import held_parts, wrapped_again
from holdfast._staging.structure import Memo, find_tensors, key_of
from holdfast.errors import PlanError

__all__ = ["Parts"]


class Parts:
    """The plain tensors of a state.

    Attributes:
        tensors: All of them: of a plain tensor itself, of a sharded one what this rank holds.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self._values = list(find_tensors(state).values())
        self.tensors = [part for value in self._values for part in held_parts(value)]

    def memo(self, copies: Sequence[torch.Tensor]) -> Memo:
        """By the identity of each value: its copy, made of copies of the tensors."""
        remaining = iter(copies)
        return {id(value): wrapped_again(value, remaining) for value in self._values}

    def _key_of(self, number: int) -> str:
        passed = itertools.accumulate(len(held_parts(value)) for value in self._values)
        return key_of(
            self._state, next(v for v, end in zip(self._values, passed, strict=True) if number < end)
        )

    def refuse_without_memory(self) -> None:
        """Raise PlanError for a tensor on the meta device, and for one whose storage was taken away."""
        for number, tensor in enumerate(self.tensors):
            if reason := _why_without_memory(tensor):
                key = self._key_of(number)
                raise PlanError(f"{key}: {reason}", key=key)

    def refuse_changed(self, copies: Sequence[torch.Tensor]) -> None:
        """Raise PlanError for a tensor that does not hold what its copy does, bit for bit."""
        for number, (source, copied) in enumerate(zip(self.tensors, copies, strict=True)):
            if _is_other_than(source, copied):
                key = self._key_of(number)
                raise PlanError(
                    f"{key}: the tensor was changed while it was staged: the copy is not what it holds now. "
                    "Wait for staging before the next step, and let no other thread write to the state "
                    "meanwhile.",
                    key=key,
                )


def _why_without_memory(tensor: torch.Tensor) -> str | None:
    """What is wrong with a tensor on the meta device, and with one whose storage was taken away."""
    if tensor.is_meta:
        return "a tensor on the meta device has no data to stage"
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.itemsize if tensor.numel() else 0
    if tensor.untyped_storage().nbytes() < needed:
        return "a tensor whose storage was resized to less than its elements has no data to stage"
    return None


def _is_other_than(source: torch.Tensor, copied: torch.Tensor) -> bool:
    as_memory = source.is_cpu and not source.is_conj() and not source.is_neg()
    if not as_memory or source.stride() != copied.stride():
        source = source.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    return differs(source.data_ptr(), copied.data_ptr(), copied.numel() * copied.itemsize)
