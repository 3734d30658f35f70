"""The items of a save plan as columns: what a rank can write, or must write, without an object for each item.

Models repeat themselves: of a thousand tensors a dozen have different shapes. An item is therefore a key and
two numbers, which refer to short lists: one of forms, one of offsets.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from holdfast._deferred import DeferredList
from holdfast._plan.interning import pack, unpack
from holdfast.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from holdfast.planner import BytesIOWriteData, SavePlan, TensorWriteData, WriteItem, WriteItemType

TENSOR, SHARD, BYTE_IO = (kind.value for kind in WriteItemType)
_TYPES = {kind.value: kind for kind in WriteItemType}


class Form(NamedTuple):
    """The facts that many items share.

    Attributes:
        properties: dtype, layout, requires_grad, name of the memory format, pin_memory.
        size: The shape of the whole tensor.
        lengths: The shape of the chunk.
    """

    properties: tuple[torch.dtype, torch.layout, bool, str, bool]
    size: torch.Size
    lengths: torch.Size

    @property
    def nbytes(self) -> int:
        """The bytes of the chunk's elements."""
        return self.lengths.numel() * self.properties[0].itemsize

    def make_properties(self) -> TensorProperties:
        """A new record of the properties, which the caller may change."""
        made = TensorProperties.__new__(TensorProperties)
        made.__setstate__(self.properties)
        return made


@dataclass(slots=True)
class WriteColumns:
    """The items of one rank's plan.

    Attributes:
        keys: The flat key of each item.
        kinds: The value of its ``WriteItemType``.
        form: The number of its form in ``forms``; -1 for an item that is not a tensor.
        offset: The number of its offset in ``offsets``; -1 for an item that is not a tensor.
        hints: The position of its chunk among the chunks of its key; -1 where that is not known.
        forms: The different forms.
        offsets: The different offsets of chunks.
        nbytes: The size of those items that are not tensors and whose size is known, by the item's number.
    """

    keys: list[str] = field(default_factory=list)
    kinds: bytearray = field(default_factory=bytearray)
    form: "array[int]" = field(default_factory=partial(array, "i"))
    offset: "array[int]" = field(default_factory=partial(array, "i"))
    hints: "array[int]" = field(default_factory=partial(array, "i"))
    forms: list[Form] = field(default_factory=list)
    offsets: list[torch.Size] = field(default_factory=list)
    nbytes: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, key: str, kind: int, form: int, offset: int, hint: int) -> None:
        """Append an item, given the numbers of its form and offset."""
        self.keys.append(key)
        self.kinds.append(kind)
        self.form.append(form)
        self.offset.append(offset)
        self.hints.append(hint)

    def item_nbytes(self) -> list[int]:
        """The bytes that each item writes, as far as they are known before it is written."""
        by_form = [form.nbytes for form in self.forms]
        # The last one is what the number -1 finds.
        sizes = list(map([*by_form, 0].__getitem__, self.form))
        for number, nbytes in self.nbytes.items():
            sizes[number] = nbytes
        return sizes

    def take(self, numbers: Sequence[int]) -> "WriteColumns":
        """Some of the items, with lists of forms and offsets of their own, so that more can be added."""
        return WriteColumns(
            list(map(self.keys.__getitem__, numbers)),
            bytearray(map(self.kinds.__getitem__, numbers)),
            array("i", map(self.form.__getitem__, numbers)),
            array("i", map(self.offset.__getitem__, numbers)),
            array("i", map(self.hints.__getitem__, numbers)),
            self.forms.copy(),
            self.offsets.copy(),
            {at: self.nbytes[n] for at, n in enumerate(numbers) if n in self.nbytes} if self.nbytes else {},
        )

    def box(self, number: int) -> ChunkStorageMetadata:
        """The box of its tensor that an item writes; not for an item that is not a tensor."""
        return ChunkStorageMetadata(self.offsets[self.offset[number]], self.forms[self.form[number]].lengths)

    def items(self) -> Iterator[WriteItem]:
        """The items as records."""
        return map(self.item, range(len(self.keys)))

    def item(self, number: int) -> WriteItem:
        """One item as a new record, which the caller may change."""
        key, hint = self.keys[number], self.hints[number]
        known_hint = None if hint < 0 else hint
        if self.kinds[number] == BYTE_IO:
            known = BytesIOWriteData(self.nbytes[number]) if number in self.nbytes else None
            return WriteItem(MetadataIndex(key, None, known_hint), WriteItemType.BYTE_IO, known)
        form, offset = self.forms[self.form[number]], self.offsets[self.offset[number]]
        data = TensorWriteData(self.box(number), form.make_properties(), form.size)
        return WriteItem(MetadataIndex(key, offset, known_hint), _TYPES[self.kinds[number]], None, data)

    def says_the_same(self, other: "WriteColumns") -> bool:
        """Whether other columns describe the same items; forms and offsets may be in another order."""
        same = ("keys", "kinds", "hints", "nbytes")
        if any(getattr(self, name) != getattr(other, name) for name in same):
            return False
        # The last one is what the number -1 finds. Few pairs of numbers differ: forms repeat.
        forms, other_forms = [*self.forms, None], [*other.forms, None]
        offsets, other_offsets = [*self.offsets, None], [*other.offsets, None]
        return all(
            forms[a] == other_forms[b] for a, b in set(zip(self.form, other.form, strict=True))
        ) and all(offsets[a] == other_offsets[b] for a, b in set(zip(self.offset, other.offset, strict=True)))

    def __reduce__(self) -> Any:
        # Tuples: a torch.Size takes twice as long on the way.
        forms = [(properties, tuple(size), tuple(lengths)) for properties, size, lengths in self.forms]
        columns = (self.kinds, self.form, self.offset, self.hints)
        return _as_received, (
            pack(self.keys),
            pack(forms),
            columns,
            list(map(tuple, self.offsets)),
            self.nbytes,
        )


def _make_forms(parts: list[tuple[Any, tuple[int, ...], tuple[int, ...]]]) -> list[Form]:
    size = torch.Size
    return [Form(properties, size(whole), size(lengths)) for properties, whole, lengths in parts]


def _as_received(
    keys: bytes,
    forms: bytes,
    columns: tuple[bytearray, "array[int]", "array[int]", "array[int]"],
    offsets: list[tuple[int, ...]],
    nbytes: dict[int, int],
) -> WriteColumns:
    sizes = list(map(torch.Size, offsets))
    return WriteColumns(unpack(keys, list), *columns, unpack(forms, _make_forms), sizes, nbytes)


class WriteItems(DeferredList[WriteItem]):
    """The ``items`` of a save plan: columns, from which the items are made when one is asked for."""

    __slots__ = ()

    def __init__(self, columns: WriteColumns) -> None:
        super().__init__(len(columns), columns.items, columns)

    def _has_changed(self) -> bool:
        # To make columns of 100,000 items takes 0.25 s; to make the items again and compare them 1.4 s.
        return not self._columns.says_the_same(_from_items(self))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, WriteItems):
            mine, theirs = self.columns, other.columns
            if mine is not None and theirs is not None:
                return bool(mine.says_the_same(theirs))
        return super().__eq__(other)

    __hash__ = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        columns = self.columns
        return super().__reduce_ex__(protocol) if columns is None else (WriteItems, (columns,))


def columns_of(plan: SavePlan) -> WriteColumns:
    """The items of any plan as columns: those it has, or new ones made from its records."""
    columns = plan.items.columns if isinstance(plan.items, WriteItems) else None
    return _from_items(plan.items) if columns is None else columns


def is_open(plan: SavePlan) -> bool:
    """Whether the items are not, or not any more, what columns say."""
    return not isinstance(plan.items, WriteItems) or plan.items.is_open


class Numbering:
    """Numbers the forms and the offsets of the items that are added to columns; equal ones get one number."""

    def __init__(self, columns: WriteColumns) -> None:
        self._columns = columns
        self._forms: dict[Form, int] = {}
        self._offsets: dict[torch.Size, int] = {}

    def of(self, form: Form, offset: torch.Size) -> tuple[int, int]:
        """The numbers of a form and of an offset; new ones are added to the columns."""
        form_number = self._forms.setdefault(form, len(self._forms))
        if form_number == len(self._columns.forms):
            self._columns.forms.append(form)
        offset_number = self._offsets.setdefault(offset, len(self._offsets))
        if offset_number == len(self._columns.offsets):
            self._columns.offsets.append(offset)
        return form_number, offset_number


def _as_size(extents: Sequence[int]) -> torch.Size:
    """A shape or offset as a torch.Size: planners of strangers may give tuples or lists."""
    return extents if type(extents) is torch.Size else torch.Size(extents)


def _from_items(items: Iterable[WriteItem]) -> WriteColumns:
    columns = WriteColumns()
    numbering = Numbering(columns)
    for item in items:
        index, data = item.index, item.tensor_data
        form = offset = -1
        if data is not None:
            # torch counts a chunk by its own offsets, and finds it by the index: they are one and the same.
            form, offset = numbering.of(
                Form(data.properties.__getstate__(), _as_size(data.size), _as_size(data.chunk.sizes)),
                _as_size(data.chunk.offsets),
            )
        elif item.bytes_io_data is not None:
            columns.nbytes[len(columns)] = item.bytes_io_data.nbytes
        columns.add(index.fqn, item.type.value, form, offset, -1 if index.index is None else index.index)
    return columns
