"""The local plan of a save: one item for each tensor, chunk and other value of a rank's flat state."""

from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from holdfast._format.dtypes import why_not_stored
from holdfast._plan.write_columns import BYTE_IO, SHARD, TENSOR, Form, Numbering, WriteColumns
from holdfast._tensors.checkpointable import describes_itself, items_to_write
from holdfast._tensors.chunks import (
    PLAIN_TYPES,
    dtype_of,
    global_shape,
    is_plain_part,
    is_sharded,
    is_tensor,
    local_chunks,
    refuse_unsavable,
)
from holdfast._tensors.dtensors import local_tensor
from holdfast._tensors.host import has_its_memory
from holdfast._tensors.layout_table import LayoutTable
from holdfast.errors import PlanError

_LARGE = 1 << 20


def plan_local_save(state: dict[str, Any]) -> WriteColumns:
    """Every value of a flat state as items, also those that other ranks hold alike.

    Raises:
        PlanError: A value cannot be saved exactly.
    """
    columns = WriteColumns()
    numbering = Numbering(columns)
    known_numbers: dict[Any, tuple[int, int]] = {}
    dtensors = _DTensorItems(columns, numbering)
    keys, kinds, forms, offsets, hints = (
        columns.keys.append,
        columns.kinds.append,
        columns.form.append,
        columns.offset.append,
        columns.hints.append,
    )
    strided = torch.strided
    for key, value in state.items():
        if (
            type(value) not in PLAIN_TYPES
            or value.layout is not strided
            or value.is_quantized
            or value.is_nested
            or value.is_meta
            or not has_its_memory(value)
        ):
            if type(value) is not DTensor or not dtensors.add(key, value):
                _add(columns, numbering, key, value)
            continue
        # What nearly all of 100,000 values are: a microsecond each.
        what = (value.dtype, value.requires_grad, value.size())
        numbers = known_numbers.get(what)
        if numbers is None:
            (chunk,) = local_chunks(value)
            form = Form(_properties_of(key, value), chunk.sizes, chunk.sizes)
            numbers = known_numbers[what] = numbering.of(form, chunk.offsets)
        keys(key)
        kinds(TENSOR)
        forms(numbers[0])
        offsets(numbers[1])
        # A tensor that is not sharded has one chunk, and this is it.
        hints(0)
    return columns


class _DTensorItems:
    """Adds DTensors to columns; what all of one layout have in common is found once."""

    def __init__(self, columns: WriteColumns, numbering: Numbering) -> None:
        self._columns = columns
        self._numbering = numbering
        self._layouts = LayoutTable()
        self._numbers: dict[Any, list[tuple[int, int]]] = {}

    def add(self, key: str, value: DTensor) -> bool:
        """Add the chunks of a tensor; False if there is something about it that must be looked at closely."""
        dtype = value.dtype
        if not is_plain_part(local_tensor(value), dtype):
            return False
        try:
            layout = self._layouts.of(value)
        except PlanError:
            return False
        what = (layout, dtype, value.requires_grad)
        numbers = self._numbers.get(what)
        if numbers is None:
            properties, size = _properties_of(key, value), value.size()
            numbers = self._numbers[what] = [
                self._numbering.of(Form(properties, size, chunk.sizes), chunk.offsets)
                for chunk in layout.chunks
            ]
        for form, offset in numbers:
            self._columns.add(key, SHARD, form, offset, -1)
        return True


def _add(columns: WriteColumns, numbering: Numbering, key: str, value: Any) -> None:
    if is_sharded(value) and describes_itself(value):
        _add_as_it_says(columns, numbering, key, value)
        return
    if not is_tensor(value):
        if isinstance(value, bytes | bytearray) and len(value) >= _LARGE:
            # Only where it matters how they are written; the size of other values is not known yet.
            columns.nbytes[len(columns)] = len(value)
        columns.add(key, BYTE_IO, -1, -1, -1)
        return
    refuse_unsavable(key, value)
    kind, hint = (SHARD, -1) if is_sharded(value) else (TENSOR, 0)
    properties, size = _properties_of(key, value), global_shape(value)
    for chunk in local_chunks(value):
        form, offset = numbering.of(Form(properties, size, chunk.sizes), chunk.offsets)
        columns.add(key, kind, form, offset, hint)


def _add_as_it_says(columns: WriteColumns, numbering: Numbering, key: str, value: Any) -> None:
    """Add the items of a value that describes itself; all its tensor items count as chunks."""
    for item in items_to_write(key, value):
        data = item.tensor_data
        if data is None:
            columns.add(key, BYTE_IO, -1, -1, -1)
            continue
        size, offsets, lengths = map(torch.Size, (data.size, data.chunk.offsets, data.chunk.sizes))
        form, offset = numbering.of(Form(data.properties.__getstate__(), size, lengths), offsets)
        columns.add(key, SHARD, form, offset, -1)


def _properties_of(key: str, value: Any) -> tuple[torch.dtype, torch.layout, bool, str, bool]:
    if why := why_not_stored(str(dtype_of(value)).removeprefix("torch.")):
        raise PlanError(f"{key}: {why}", key=key)
    if not isinstance(value, ShardedTensor):
        # Whether memory is pinned is deprecated knowledge, and asking costs a call into the runtime.
        return value.dtype, value.layout, value.requires_grad, "contiguous_format", False
    described = value.metadata().tensor_properties
    memory_format = str(described.memory_format).removeprefix("torch.")
    return described.dtype, described.layout, described.requires_grad, memory_format, described.pin_memory
