"""Which keys a load plan fills, which keys of the state it leaves alone, and what it does not read."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from holdfast._format.description import OBJECT, Directory
from holdfast._plan.metadata_entries import directory_of
from holdfast._plan.read_columns import keys_of, stored_keys_of
from holdfast._plan.tied_tensors import also_filled
from holdfast._tensors.chunks import global_shape, is_tensor, local_parts
from holdfast.load_result import LoadResult
from holdfast.metadata import Metadata
from holdfast.per_rank import RankKey, rank_key
from holdfast.planner import LoadPlan


def cover(plan: LoadPlan, state: Mapping[str, Any] | None, metadata: Metadata) -> LoadResult:
    """Which keys a load by ``plan`` fills, leaves alone and does not read.

    Args:
        plan: What this rank reads.
        state: The flat state that it fills; None if the planner does not say. A planner that fills something
            else has an empty one, and its plan tells.
        metadata: The checkpoint's metadata.
    """
    there = metadata.state_dict_metadata
    keys = keys_of(plan)
    # What nearly every load is: each key of the state is one item. Equal lists are compared in microseconds.
    if state is not None and len(keys) == len(state) and keys == list(state):
        loaded, left_alone = keys, list[str]()
    else:
        loaded, left_alone = _divide(dict.fromkeys(keys), state, metadata)
    stored = stored_keys_of(plan)
    if loaded is keys and stored is keys and len(keys) == len(there):
        return LoadResult(tuple(keys))
    known = {*stored, *loaded, *left_alone}
    not_asked_for = [key for key in there if key not in known]
    if any("@rank-" in key for key in not_asked_for):
        own = own_places(known)
        not_asked_for = [key for key in not_asked_for if not is_of_another_rank(key, own)]
    return LoadResult(tuple(loaded), tuple(left_alone), tuple(not_asked_for))


def own_places(keys: Iterable[str]) -> dict[str, set[RankKey]]:
    """The places of the PerRank values among some flat keys, with the ranks whose values are there."""
    places: dict[str, set[RankKey]] = {}
    for key in keys:
        if (told := rank_key(key)) is not None:
            places.setdefault(told.key, set()).add(told)
    return places


def is_of_another_rank(key: str, own: dict[str, set[RankKey]]) -> bool:
    """Whether a key belongs to another rank, at a place where this rank has a value of its own."""
    told = rank_key(key)
    return told is not None and told.key in own and told not in own[told.key]


def _divide(
    planned: dict[str, None], state: Mapping[str, Any] | None, metadata: Metadata
) -> tuple[list[str], list[str]]:
    """The keys that are loaded, and those that are left alone."""
    if not state:
        return list(planned), []
    unread = [key for key in state if key not in planned]
    if not unread:
        return list(state), []
    directory = directory_of(metadata)
    done = {*planned, *(key for key in unread if _needs_no_read(key, state[key], directory))}
    done |= also_filled(state, done)
    return [key for key in state if key in done], [key for key in unread if key not in done]


def _needs_no_read(key: str, value: Any, directory: Directory) -> bool:
    """Whether the checkpoint has a tensor of which this rank holds no element."""
    number = directory.numbers.get(key)
    return (
        number is not None
        and directory.kinds[number] != OBJECT
        and is_tensor(value)
        and global_shape(value) == torch.Size(directory.shape(number))
        and not any(part.numel() for part in local_parts(value))
    )
