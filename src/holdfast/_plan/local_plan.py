"""What a rank offers to write of a flat state: one line for each tensor, chunk and other value."""

from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from holdfast._plan.write_columns import BYTE_IO, SHARD, TENSOR, Form, WriteColumns
from holdfast._tensors.chunks import global_shape, is_sharded, is_tensor, local_chunks, refuse_unsavable

__all__ = ["Offering"]

_LARGE = 1 << 20
_PLAIN = {torch.Tensor, torch.nn.Parameter}


class Offering:
    """Collects what this rank could write, line by line."""

    def __init__(self) -> None:
        self.columns = WriteColumns()
        self._forms: dict[Any, int] = {}
        self._offsets: dict[Any, int] = {}
        self._plain: dict[Any, tuple[int, int]] = {}

    def add_all(self, state: dict[str, Any]) -> None:
        """Offer every value of a flat state.

        Raises:
            PlanError: A value cannot be saved exactly.
        """
        columns, plain = self.columns, self._plain
        keys, kinds, form, offset, hints = (
            columns.keys.append,
            columns.kinds.append,
            columns.form.append,
            columns.offset.append,
            columns.hints.append,
        )
        strided = torch.strided
        for key, value in state.items():
            if (
                type(value) not in _PLAIN
                or value.layout is not strided
                or value.is_quantized
                or value.is_nested
                or value.is_meta
            ):
                self._add(key, value)
                continue
            # What nearly all of 100,000 values are: a microsecond each.
            what = (value.dtype, value.requires_grad, value.size())
            known = plain.get(what)
            if known is None:
                known = plain[what] = self._form_of(value)
            keys(key)
            kinds(TENSOR)
            form(known[0])
            offset(known[1])
            # A tensor that is not sharded has one chunk, and this is it.
            hints(0)

    def _form_of(self, value: torch.Tensor) -> tuple[int, int]:
        (chunk,) = local_chunks(value)
        return self._number(Form(_properties_of(value), chunk.sizes, chunk.sizes), chunk.offsets)

    def _number(self, form: Form, offsets: torch.Size) -> tuple[int, int]:
        columns = self.columns
        form_number = self._forms.setdefault(form, len(self._forms))
        if form_number == len(columns.forms):
            columns.forms.append(form)
        offset_number = self._offsets.setdefault(offsets, len(self._offsets))
        if offset_number == len(columns.offsets):
            columns.offsets.append(offsets)
        return form_number, offset_number

    def _add(self, key: str, value: Any) -> None:
        if not is_tensor(value):
            if isinstance(value, bytes | bytearray) and len(value) >= _LARGE:
                # Only where it matters how they are written; the size of other values is not known yet.
                self.columns.nbytes[len(self.columns)] = len(value)
            self._add_line(key, BYTE_IO, -1, -1, -1)
            return
        refuse_unsavable(key, value)
        kind = SHARD if is_sharded(value) else TENSOR
        properties, size = _properties_of(value), global_shape(value)
        for chunk in local_chunks(value):
            form, offset = self._number(Form(properties, size, chunk.sizes), chunk.offsets)
            self._add_line(key, kind, form, offset, -1 if kind == SHARD else 0)

    def _add_line(self, key: str, kind: int, form: int, offset: int, hint: int) -> None:
        columns = self.columns
        columns.keys.append(key)
        columns.kinds.append(kind)
        columns.form.append(form)
        columns.offset.append(offset)
        columns.hints.append(hint)


def _properties_of(value: Any) -> tuple[torch.dtype, torch.layout, bool, str, bool]:
    if not isinstance(value, ShardedTensor):
        # Whether memory is pinned is deprecated knowledge, and asking costs a call into the runtime.
        return value.dtype, value.layout, value.requires_grad, "contiguous_format", False
    described = value.metadata().tensor_properties
    memory_format = str(described.memory_format).removeprefix("torch.")
    return described.dtype, described.layout, described.requires_grad, memory_format, described.pin_memory
