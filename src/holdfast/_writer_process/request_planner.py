"""The planner that goes to the writer process: it has the values of one request."""

import copy
import io
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch

from holdfast._plan.planner_values import HasOwnValues, own_values
from holdfast._plan.write_columns import BYTE_IO, SHARD, TENSOR, columns_of, is_open
from holdfast._tensors.chunks import find_box
from holdfast._tensors.layout_table import LayoutTable
from holdfast.errors import UsageError
from holdfast.metadata import MetadataIndex
from holdfast.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

_OF_ALL_RANKS = ("global_plan", "metadata", "_cache")
"""Attributes of default planners that describe all ranks. Writing does not need them."""


class RequestPlanner(SavePlanner):
    """Answers ``resolve_data`` in the writer process, and no other call.

    Attributes:
        whole: Whole tensors by key.
        others: Chunks of tensors and objects in their stored form, by key and offset.
        planner: The trainer's planner, which is asked for all other values.
        check_cancelled: Called before each value; an exception from it stops the write.
    """

    def __init__(self, planner: SavePlanner | None) -> None:
        self.whole: dict[str, torch.Tensor] = {}
        self.others: dict[tuple[str, tuple[int, ...]], Any] = {}
        self.planner = planner
        self.check_cancelled: Callable[[], None] | None = None

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The data of an item."""
        if self.check_cancelled is not None:
            self.check_cancelled()
        found: Any = None
        if write_item.type == WriteItemType.TENSOR:
            found = self.whole.get(write_item.index.fqn)
        if found is None:
            found = self.others.get(_place(write_item.index))
        if found is None:
            assert self.planner is not None, f"{write_item.index.fqn} is not part of the request"
            found = self.planner.resolve_data(write_item)
        data: torch.Tensor | io.BytesIO = found
        return data

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise UsageError("the trainer plans; the writer process only writes")

    set_up_planner = create_local_plan = create_global_plan = finish_plan = _refuse


class _CompleteRequestPlanner(RequestPlanner, HasOwnValues):
    """Has all values, so that a storage can take whole tensors from ``state_dict`` without a call each."""

    resolvers = MappingProxyType({"resolve_data": ("resolve_data",)})

    @property
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return self.whole


def _place(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


def request_planner(plan: SavePlan, planner: SavePlanner) -> RequestPlanner:
    """Make the planner that goes to the writer process.

    The values of a default planner are resolved here: they are tensors in the staged memory. Another planner
    is sent along and resolves its values there, because they may be as large as the tensors. Only shards are
    always resolved here: the writer process has neither their mesh nor their process group.
    """
    columns = columns_of(plan)
    values = own_values(planner, "resolve_data")
    if values is None:
        made, resolved = RequestPlanner(_without_other_ranks(planner)), {SHARD}
    else:
        made, resolved = _CompleteRequestPlanner(None), {BYTE_IO}
    opened = plan.items if is_open(plan) else None
    layouts = LayoutTable()
    for number, (key, kind) in enumerate(zip(columns.keys, columns.kinds, strict=True)):
        if kind == TENSOR and values is not None:
            made.whole[key] = values[key]
        elif kind == SHARD and values is not None:
            box = columns.box(number)
            made.others[key, tuple(box.offsets)] = find_box(values[key], key, box, layouts)
        elif kind in resolved:
            item = columns.item(number) if opened is None else opened[number]
            made.others[_place(item.index)] = planner.resolve_data(item)
    return made


def _without_other_ranks(planner: SavePlanner) -> SavePlanner:
    if not isinstance(planner, HasOwnValues):
        return planner
    mine = copy.copy(planner)
    for name in _OF_ALL_RANKS:
        vars(mine).pop(name, None)
    return mine
