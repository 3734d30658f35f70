"""Keys of a state under which one tensor stands: it can be filled once, with one value."""

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from typing import Any

import torch

from holdfast._tensors.checkpointable import describes_itself
from holdfast._tensors.chunks import PLAIN_TYPES, is_tensor
from holdfast._tensors.meta_memory import alias_of


def tied_keys(state: Mapping[str, Any]) -> list[list[str]]:
    """The keys of each tensor that a flat state has under several keys, in the order of the state.

    Tensors that share a part of their memory only are not found.
    """
    strided = torch.strided
    # Nearly no state has any, and an address takes a tenth of the time. On the meta device it is 0.
    plain = {
        key: value.data_ptr()
        for key, value in state.items()
        if type(value) in PLAIN_TYPES and value.layout is strided
    }
    closer = [key for key in state if key not in plain] if len(plain) < len(state) else []
    if len(set(plain.values())) < len(plain):
        count = Counter(plain.values())
        closer += [key for key, address in plain.items() if count[address] > 1]
    by_alias: dict[Hashable, list[str]] = {}
    for key in closer:
        value = state[key]
        if is_tensor(value) and not describes_itself(value):
            by_alias.setdefault(alias_of(value), []).append(key)
    return [keys for keys in by_alias.values() if len(keys) > 1]


def also_filled(state: Mapping[str, Any], planned: Collection[str]) -> set[str]:
    """The keys that a plan fills, stored or not, because their tensor is read under a planned key."""
    return {key for group in tied_keys(state) if any(key in planned for key in group) for key in group}
