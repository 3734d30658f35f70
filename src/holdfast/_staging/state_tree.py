"""Walks a nested state: finds its tensors, and copies everything around them."""

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch

from holdfast._tensors.checkpointable import describes_itself, shards_wrapper
from holdfast._tensors.chunks import is_sharded, is_tensor
from holdfast._tensors.tensor_parts import TensorParts
from holdfast.errors import PlanError, UsageError

Memo: TypeAlias = dict[int, Any]
"""Maps the identity of an original to its copy, as the memo of ``copy.deepcopy`` does."""

_PLAIN = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}

IMMUTABLE = {
    type(None), bool, int, float, complex, str, bytes, range, type, type(Ellipsis),
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
}  # fmt: skip
"""Classes of values that a copy of a state shares with the original."""


def find_tensors(state: Any) -> dict[int, torch.Tensor]:
    """Find each tensor that is staged as memory, once, by its identity, in the order of the state.

    Tensors inside objects, sparse and quantized tensors, and unknown tensor classes are left out: they are
    copied as objects.
    """
    found: dict[int, torch.Tensor] = {}
    try:
        _find(state, found, set())
    except RecursionError:
        raise UsageError("the state is nested too deeply to be staged") from None
    return found


def _find(value: Any, found: dict[int, torch.Tensor], seen: set[int]) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    for entry in value.values() if isinstance(value, Mapping) else value:
        kind = type(entry)
        if kind in _PLAIN or isinstance(entry, torch.Tensor):
            if is_tensor(entry) and (kind in _PLAIN or _has_known_shards(entry)):
                found[id(entry)] = entry
        elif kind not in IMMUTABLE and isinstance(entry, Mapping | list | tuple):
            _find(entry, found, seen)


def _has_known_shards(value: torch.Tensor) -> bool:
    return is_sharded(value) and (not describes_itself(value) or shards_wrapper(value) is not None)


def copy_around(state: Any, memo: Memo) -> Any:
    """Copy the containers and objects of a state, and put the tensors of ``memo`` into the copy.

    Immutable values are shared with the original. An object that is in two places of the state is copied
    once, and is in the same two places of the copy.

    Raises:
        PlanError: A value cannot be copied; the error has its key.
    """
    try:
        return _copied(state, memo, state)
    except RecursionError:
        raise UsageError("the state is nested too deeply to be staged") from None


def _copied(value: Any, memo: Memo, state: Any) -> Any:
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    known = memo.get(id(value), memo)
    if known is not memo:
        return known
    if kind is dict or kind is OrderedDict or kind is TensorParts:
        made = memo[id(value)] = TensorParts(about=value.about) if kind is TensorParts else kind()
        for key, entry in value.items():
            made[key] = _copied(entry, memo, state)
        return made
    if kind is list:
        items: list[Any] = []
        memo[id(value)] = items
        items.extend(_copied(entry, memo, state) for entry in value)
        return items
    if kind is tuple:
        return tuple([_copied(entry, memo, state) for entry in value])
    return _copied_object(value, memo, state)


def _copied_object(original: Any, memo: Memo, state: Any) -> Any:
    value = original
    try:
        if isinstance(value, torch.Tensor):
            # deepcopy refuses a tensor that is the result of an operation, compressed sparse and nested ones.
            value = value.detach()
            if value.layout != torch.strided or value.is_nested:
                made = memo[id(original)] = value.clone()
                return made
        return copy.deepcopy(value, memo)
    except RecursionError:
        raise
    except Exception as error:
        key = key_of(state, original)
        raise PlanError(
            f"{key}: a {type(value).__module__}.{type(value).__qualname__} cannot be copied: {error}. Leave "
            "it out of the state, or give it a __deepcopy__ method.",
            key=key,
        ) from error


def leaves_of(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """All values that are not containers, each with its flat key."""
    if isinstance(state, torch.Tensor) or not isinstance(state, Mapping | list | tuple):
        yield ".".join(str(step) for step in path), state
        return
    for step, value in state.items() if isinstance(state, Mapping) else enumerate(state):
        yield from leaves_of(value, (*path, step))


def key_of(state: Any, wanted: Any) -> str:
    """The flat key of the first place where a state has this very object, "?" if there is none."""
    try:
        return next((key for key, value in leaves_of(state) if value is wanted), "?")
    except RecursionError:
        return "?"
