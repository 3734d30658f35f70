"""Walks nested states under the names of torch's module; the rules are in ``_plan/flatten``."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from holdfast._contents.nested_state import put_at, true_key
from holdfast._plan.flatten import flatten
from holdfast._tensors.chunks import is_any_tensor, local_chunks, local_parts

PATH_ITEM: TypeAlias = "str | int"
"""A step of a path: a key of a dict as a string, or a position in a list."""

OBJ_PATH: TypeAlias = "tuple[PATH_ITEM, ...]"
"""How to reach a value from the state."""

STATE_DICT_ITEM: TypeAlias = object
CONTAINER_TYPE: TypeAlias = "dict[PATH_ITEM, STATE_DICT_ITEM]"

__all__ = ["get_element", "print_tensor", "set_element", "traverse_state_dict"]

_keep_visiting_tensors = is_any_tensor  # as torch calls it

Visitor: TypeAlias = Callable[[OBJ_PATH, Any], None]


def traverse_state_dict(
    state_dict: Mapping[Any, Any],
    visitor: Visitor,
    keep_traversing: Callable[[Any], bool] | None = is_any_tensor,
) -> None:
    """Call ``visitor`` with the path and the value of each leaf, in the order of the state.

    Dicts are opened, and lists that hold a dict or a value for which ``keep_traversing`` is true, at any
    depth of lists. Everything else is a leaf. In paths the keys of dicts are strings.

    Raises:
        UsageError: Two leaves have the same flat key, or the state contains itself.
    """
    _visit(state_dict, visitor, keep_traversing, open_every_dict=True)


def traverse_state_dict_v_2_3(
    state_dict: Mapping[Any, Any],
    visitor: Visitor,
    keep_traversing: Callable[[Any], bool] | None = is_any_tensor,
) -> None:
    """As ``traverse_state_dict``, by the rule of torch before 2.4: a dict without tensors in it is a leaf."""
    _visit(state_dict, visitor, keep_traversing, open_every_dict=False)


def _visit(
    state: Mapping[Any, Any],
    visitor: Visitor,
    keep_traversing: Callable[[Any], bool] | None,
    *,
    open_every_dict: bool,
) -> None:
    is_opener = keep_traversing or (lambda _: False)
    leaves, paths, _ = flatten(state, is_opener, open_every_dict=open_every_dict)
    for key, value in leaves.items():
        # Visitors ask for the type of a step: a key is exactly a str.
        visitor(tuple(step if type(step) is int else str(step) for step in paths[key]), value)


def set_element(root_dict: dict[Any, Any], path: OBJ_PATH, value: Any) -> None:
    """Put a value where ``path`` leads, with new dicts and lists on the way as they are needed.

    A list grows to the position, with None in between.
    """
    container: Any = root_dict
    for step, following in itertools.pairwise(path):
        known = get_element(container, (step,))
        if known is None:
            known = [] if type(following) is int else {}
            put_at(container, step, known)
        container = known
    put_at(container, path[-1], value)


def get_element(root_dict: Mapping[Any, Any], path: OBJ_PATH, default_value: Any = None) -> Any:
    """The value that ``path`` leads to; ``default_value`` if there is nothing."""
    value: Any = root_dict
    for step in path:
        key = true_key(step)
        is_there = 0 <= key < len(value) if isinstance(value, list) and type(key) is int else False
        if not is_there and not (isinstance(value, Mapping) and key in value):
            return default_value
        value = value[key]
    return value


def print_tensor(path: OBJ_PATH, value: Any, print_fun: Callable[[str], None] = print) -> None:
    """Print what a value is, in a line or a few: a visitor for ``traverse_state_dict``."""
    if not isinstance(value, DTensor | ShardedTensor):
        kind = f"Tensor size: {value.size()}" if isinstance(value, torch.Tensor) else f"Type: {type(value)}"
        print_fun(f"{path} {kind}")
        return
    size = value.metadata().size if isinstance(value, ShardedTensor) else value.size()
    print_fun(f"{path} {type(value).__name__} size: {size}")
    for chunk, part in zip(local_chunks(value), local_parts(value), strict=False):
        print_fun(f"{tuple(chunk.offsets)} Tensor size: {part.size()}")
