"""From what ranks offer to what each shall write: one writer an item, one description of the whole."""

import dataclasses
from collections.abc import Sequence

from holdfast._geometry import Box, check_cover
from holdfast.errors import InvalidPlanError
from holdfast.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from holdfast.planner import SavePlan, WriteItem, WriteItemType

__all__ = ["assign_writers", "describe", "find_problems"]


def assign_writers(plans: list[SavePlan], *, lowest_rank: bool) -> list[SavePlan]:
    """Keep each item that several ranks offer in exactly one plan.

    The item goes to the rank with the fewest bytes so far, or to the lowest rank that has it. What only
    one rank offers stays there. Plans come back in rank order; the input is unchanged.
    """
    if len(plans) == 1:
        return plans
    holders: dict[MetadataIndex, list[int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
    if all(len(ranks) == 1 for ranks in holders.values()):
        return plans
    load = [0] * len(plans)
    offered = {item.index: item for plan in plans for item in plan.items}
    for index, ranks in holders.items():
        if len(ranks) == 1:
            load[ranks[0]] += chunk_nbytes(offered[index])
    writer: dict[MetadataIndex, int] = {}
    for index, ranks in holders.items():
        if len(ranks) > 1:
            chosen = ranks[0] if lowest_rank else min(ranks, key=load.__getitem__)
            load[chosen] += chunk_nbytes(offered[index])
            writer[index] = chosen
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if writer.get(item.index, rank) == rank])
        for rank, plan in enumerate(plans)
    ]


def chunk_nbytes(item: WriteItem) -> int:
    """How many bytes of elements an item writes; 0 for what is not a tensor and has no known size."""
    if item.tensor_data is None:
        return item.bytes_io_data.nbytes if item.bytes_io_data is not None else 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def describe(plans: list[SavePlan], *, rewrite_hints: bool) -> tuple[list[SavePlan], Metadata]:
    """The metadata of all that the plans write, and the plans with each item's place in it as a hint.

    Raises:
        InvalidPlanError: Two items claim one key, or disagree about their tensor.
    """
    entries: dict[str, STORAGE_TYPES] = {}
    described = [
        dataclasses.replace(plan, items=[_describe_item(item, entries, rewrite_hints) for item in plan.items])
        for plan in plans
    ]
    return described, Metadata(entries)


def _describe_item(item: WriteItem, entries: dict[str, STORAGE_TYPES], rewrite_hints: bool) -> WriteItem:
    key = item.index.fqn
    entry = entries.get(key)
    if item.type != WriteItemType.SHARD and entry is not None:
        raise InvalidPlanError(f"{key}: two items of the plan write this key", key=key)
    data = item.tensor_data
    if data is None:
        entries[key] = BytesStorageMetadata()
        return item
    if entry is None:
        entries[key] = entry = TensorStorageMetadata(data.properties, data.size, [])
    elif not isinstance(entry, TensorStorageMetadata):
        raise InvalidPlanError(f"{key}: one rank saves a tensor, another something else", key=key)
    elif entry.size != data.size or entry.properties.dtype != data.properties.dtype:
        raise InvalidPlanError(
            f"{key}: shards disagree: {tuple(entry.size)} of {entry.properties.dtype} and "
            f"{tuple(data.size)} of {data.properties.dtype}",
            key=key,
        )
    hint = len(entry.chunks)
    entry.chunks.append(data.chunk)
    if not rewrite_hints or item.index.index == hint:
        return item
    index = MetadataIndex(key, item.index.offset, hint)
    return WriteItem(index, item.type, item.bytes_io_data, data)


def find_problems(metadata: Metadata, *, whole: bool) -> list[str]:
    """What is wrong with the chunks of a plan: out of bounds, overlapping, or (if ``whole``) with gaps."""
    problems = []
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata) or _is_one_whole_chunk(entry.chunks, entry.size):
            continue
        boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        problems += [
            f"key:{key} {problem}"
            for problem in check_cover(entry.size, boxes)
            if whole or problem.kind != "gap"
        ]
    return problems


def _is_one_whole_chunk(chunks: Sequence[ChunkStorageMetadata], size: Sequence[int]) -> bool:
    return len(chunks) == 1 and chunks[0].sizes == size and not any(chunks[0].offsets)
