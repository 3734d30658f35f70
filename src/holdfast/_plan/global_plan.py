"""From what each rank can write to what each must write, and the metadata of the whole checkpoint."""

import dataclasses
from array import array
from typing import Any

import torch

from holdfast._format.description import TENSOR, Directory
from holdfast._geometry import Box, check_cover
from holdfast._plan.all_plans import AllPlans
from holdfast._plan.dedup import dedup_save_plans
from holdfast._plan.metadata_entries import (
    MetadataEntries,
    chunk_boxes,
    description_of,
    directory_of,
    is_one_whole_chunk,
)
from holdfast._plan.write_columns import WriteColumns, WriteItems, columns_of, is_open
from holdfast.metadata import Metadata
from holdfast.planner import SavePlan, WriteItem


def merge(
    plans: list[SavePlan], *, lowest_rank: bool, may_split: bool = False
) -> tuple[list[SavePlan], Metadata]:
    """Give each item to one rank, and make the metadata of all of them.

    Args:
        plans: What each rank can write, in rank order.
        lowest_rank: As for ``dedup_save_plans``.
        may_split: As for ``dedup_save_plans``.

    Raises:
        InvalidPlanError: The plans contradict each other.
    """
    table = AllPlans([columns_of(plan) for plan in plans])
    deduped = dedup_save_plans(plans, table, lowest_rank=lowest_rank, may_split=may_split)
    if deduped is not plans:
        # The keys stay in the order in which the ranks have them.
        table = AllPlans([columns_of(plan) for plan in deduped], table.keys)
    return describe(deduped, table)


def describe(
    plans: list[SavePlan], table: AllPlans | None = None, *, rewrite_hints: bool = True
) -> tuple[list[SavePlan], Metadata]:
    """The metadata of all that the plans write, and the plans with each item's place in it as a hint.

    Args:
        plans: The plans in rank order. Each item is in one of them only.
        table: The table of these plans, if it has been made already.
        rewrite_hints: False returns the plans as they are.

    Raises:
        InvalidPlanError: Two items have one key, or disagree about their tensor.
    """
    table = table or AllPlans([columns_of(plan) for plan in plans])
    description, hints = table.describe()
    if rewrite_hints:
        plans = list(map(_with_hints, plans, table.plans, hints))
    return plans, Metadata(MetadataEntries(description))


def _with_hints(plan: SavePlan, columns: WriteColumns, hints: "array[int]") -> SavePlan:
    items: list[WriteItem] = WriteItems(dataclasses.replace(columns, hints=hints))
    if is_open(plan):
        items = [
            item
            if hint < 0 or item.index.index == hint
            else dataclasses.replace(item, index=dataclasses.replace(item.index, index=hint))
            for item, hint in zip(plan.items, hints, strict=True)
        ]
    return dataclasses.replace(plan, items=items)


def find_problems(metadata: Metadata, *, whole: bool) -> list[str]:
    """List chunks of a plan that are out of bounds, that overlap, or (if ``whole``) that leave gaps."""
    description, directory = description_of(metadata), directory_of(metadata)
    if description.all_are_whole():
        return []
    problems = []
    proved = set[Any]()
    for key, number in directory.numbers.items():
        if description.kinds[number] != TENSOR:
            continue
        # The proof for one tensor is the proof for all that are divided alike.
        layout = directory.layout(number)
        if layout in proved:
            continue
        if _is_proved(directory, number):
            proved.add(layout)
            continue
        boxes = [Box(tuple(offsets), tuple(lengths)) for offsets, lengths in directory.boxes(number)]
        problems += [
            f"key:{key} {problem}"
            for problem in check_cover(directory.shape(number), boxes)
            if whole or problem.kind != "gap"
        ]
    return problems


def _is_proved(directory: Directory, number: int) -> bool:
    """Whether a few passes over the columns show that the chunks cover the tensor; False shows nothing.

    They do for one whole chunk, and for slices along one dimension, in whatever order: what sharding
    makes of most tensors. 4096 slices take 0.2 ms where the general proof takes 2.
    """
    shape, ndim = directory.shape(number), directory.ndim[number]
    if directory.count[number] < 2 or not ndim:
        return is_one_whole_chunk(directory, number)
    offsets, lengths = chunk_boxes(directory, number)
    cut = [d for d in range(ndim) if bool((offsets[:, d] != 0).any() or (lengths[:, d] != shape[d]).any())]
    if len(cut) != 1:
        return False
    starts, order = torch.sort(offsets[:, cut[0]])
    ends = starts + lengths[order, cut[0]]
    return bool(starts[0] == 0 and ends[-1] == shape[cut[0]] and (starts[1:] == ends[:-1]).all())
