"""The lines of a save plan as columns: what every rank offers and is told, without an object for each line.

Models repeat themselves: of a thousand tensors a dozen have different shapes. A line is therefore a key and
the numbers of two things that stand in short lists, its form and its offset.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from holdfast._deferred import DeferredList
from holdfast._plan.interning import pack, unpack
from holdfast.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from holdfast.planner import BytesIOWriteData, SavePlan, TensorWriteData, WriteItem, WriteItemType

__all__ = ["BYTE_IO", "SHARD", "TENSOR", "Form", "WriteColumns", "WriteItems", "columns_of", "is_open"]

TENSOR, SHARD, BYTE_IO = (kind.value for kind in WriteItemType)
_TYPES = {kind.value: kind for kind in WriteItemType}


class Form(NamedTuple):
    """What lines have in common.

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
        """A record of the properties that belongs to nobody else."""
        made = TensorProperties.__new__(TensorProperties)
        made.__setstate__(self.properties)
        return made


class WriteColumns:
    """The lines of one rank's plan.

    Attributes:
        keys: The flat key of each line.
        kinds: The value of its ``WriteItemType``.
        form: The number of its form; -1 for what is not a tensor.
        offset: The number of its offset; -1 for what is not a tensor.
        hints: Where its chunk stands among those of its key; -1 where that is not known.
        forms: The forms.
        offsets: The offsets.
        nbytes: The size of some of the lines that are not tensors, by their number.
    """

    __slots__ = ("form", "forms", "hints", "keys", "kinds", "nbytes", "offset", "offsets")

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.kinds = bytearray()
        self.form = array("i")
        self.offset = array("i")
        self.hints = array("i")
        self.forms: list[Form] = []
        self.offsets: list[torch.Size | None] = []
        self.nbytes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def line_nbytes(self) -> list[int]:
        """The bytes that each line writes, as far as they are known before it is written."""
        by_form = [form.nbytes for form in self.forms]
        # The last one is what the number -1 finds.
        sizes = list(map([*by_form, 0].__getitem__, self.form))
        for number, nbytes in self.nbytes.items():
            sizes[number] = nbytes
        return sizes

    def take(self, numbers: Sequence[int]) -> "WriteColumns":
        """Some of the lines."""
        taken = WriteColumns()
        taken.keys = list(map(self.keys.__getitem__, numbers))
        taken.kinds = bytearray(map(self.kinds.__getitem__, numbers))
        taken.form = array("i", map(self.form.__getitem__, numbers))
        taken.offset = array("i", map(self.offset.__getitem__, numbers))
        taken.hints = array("i", map(self.hints.__getitem__, numbers))
        taken.forms, taken.offsets = self.forms, self.offsets
        if self.nbytes:
            taken.nbytes = {at: self.nbytes[n] for at, n in enumerate(numbers) if n in self.nbytes}
        return taken

    def with_hints(self, hints: "array[int]") -> "WriteColumns":
        """The same lines with other hints."""
        same = WriteColumns()
        same.keys, same.kinds, same.form, same.offset = self.keys, self.kinds, self.form, self.offset
        same.forms, same.offsets, same.nbytes, same.hints = self.forms, self.offsets, self.nbytes, hints
        return same

    def lines(self) -> Iterator[WriteItem]:
        """The lines as records."""
        return map(self.line, range(len(self.keys)))

    def line(self, number: int) -> WriteItem:
        """One line as a record of its own: whoever gets it may change it."""
        key, hint = self.keys[number], self.hints[number]
        known_hint = None if hint < 0 else hint
        if self.kinds[number] == BYTE_IO:
            known = BytesIOWriteData(self.nbytes[number]) if number in self.nbytes else None
            return WriteItem(MetadataIndex(key, None, known_hint), WriteItemType.BYTE_IO, known)
        form, offset = self.forms[self.form[number]], self.offsets[self.offset[number]]
        assert offset is not None
        chunk = ChunkStorageMetadata(offset, form.lengths)
        data = TensorWriteData(chunk, form.make_properties(), form.size)
        return WriteItem(MetadataIndex(key, offset, known_hint), _TYPES[self.kinds[number]], None, data)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WriteColumns):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        # Tuples: a torch.Size takes twice as long on the way.
        offsets = [None if offset is None else tuple(offset) for offset in self.offsets]
        lines = (self.kinds, self.form, self.offset, self.hints)
        return _as_received, (pack(self.keys), pack(_Forms(self.forms)), lines, offsets, self.nbytes)


class _Forms:
    """Forms on their way."""

    def __init__(self, forms: Iterable[Form]) -> None:
        self.forms = list(forms)

    def __reduce__(self) -> Any:
        parts = [(properties, tuple(size), tuple(lengths)) for properties, size, lengths in self.forms]
        return _make_forms, (parts,)


def _make_forms(parts: list[tuple[Any, tuple[int, ...], tuple[int, ...]]]) -> list[Form]:
    size = torch.Size
    return [Form(properties, size(whole), size(lengths)) for properties, whole, lengths in parts]


def _as_received(
    keys: bytes,
    forms: bytes,
    lines: tuple[bytearray, "array[int]", "array[int]", "array[int]"],
    offsets: list[tuple[int, ...] | None],
    nbytes: dict[int, int],
) -> WriteColumns:
    made = WriteColumns()
    made.keys, made.forms = list(unpack(keys)), list(unpack(forms))
    made.kinds, made.form, made.offset, made.hints = lines
    made.offsets = [None if offset is None else torch.Size(offset) for offset in offsets]
    made.nbytes = nbytes
    return made


class WriteItems(DeferredList[WriteItem]):
    """The ``items`` of a plan that is columns until somebody looks at a line."""

    __slots__ = ("columns",)

    def __init__(self, columns: WriteColumns) -> None:
        super().__init__(len(columns), columns.lines)
        self.columns: WriteColumns | None = columns

    def let_go(self) -> None:
        """The lines may be changed now, and the columns would not know."""
        self.columns = None

    def __eq__(self, other: object) -> bool:
        if isinstance(other, WriteItems) and self.columns is not None and other.columns is not None:
            return self.columns == other.columns
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.columns is not None:
            return WriteItems, (self.columns,)
        return super().__reduce_ex__(protocol)


def columns_of(plan: SavePlan) -> WriteColumns:
    """A plan's lines as columns, whatever they are."""
    lines = plan.items
    if isinstance(lines, WriteItems) and lines.columns is not None:
        return lines.columns
    return _from_lines(lines)


def is_open(plan: SavePlan) -> bool:
    """Whether somebody has seen the lines, and may have changed them."""
    return not isinstance(plan.items, WriteItems) or plan.items.columns is None


def _from_lines(lines: Iterable[WriteItem]) -> WriteColumns:
    columns = WriteColumns()
    form_numbers: dict[Any, int] = {}
    offset_numbers: dict[Any, int] = {}
    for number, line in enumerate(lines):
        index, data = line.index, line.tensor_data
        columns.keys.append(index.fqn)
        columns.kinds.append(line.type.value)
        columns.hints.append(-1 if index.index is None else index.index)
        if data is None:
            columns.form.append(-1)
            columns.offset.append(-1)
            if line.bytes_io_data is not None:
                columns.nbytes[number] = line.bytes_io_data.nbytes
            continue
        form = Form(data.properties.__getstate__(), data.size, data.chunk.sizes)
        columns.form.append(form_numbers.setdefault(form, len(form_numbers)))
        # torch counts a chunk by its own offsets, and finds it by the index: they are one and the same.
        columns.offset.append(offset_numbers.setdefault(data.chunk.offsets, len(offset_numbers)))
    columns.forms, columns.offsets = list(form_numbers), list(offset_numbers)
    return columns
