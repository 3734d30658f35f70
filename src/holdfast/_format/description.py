"""What a checkpoint holds, as columns: keys, their kinds and properties, shapes, and the boxes of chunks.

A checkpoint may have millions of chunks. So there is no object for a chunk: each property is one column, a
run of little-endian integers, and a row is made when somebody asks for it. As for the elements of tensors,
the order of the machine is taken to be that order.
"""

import itertools
import math
from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from operator import add, gt, mul
from typing import Any, Literal, TypeVar

import msgspec

H = TypeVar("H", bound=Hashable)

TENSOR, OBJECT = 0, 1
"""The kinds of a key."""


class Description(msgspec.Struct, kw_only=True):
    """The keys and their chunks. Columns are ``bytes``; ``docs/format.md`` describes each."""

    keys: list[str]
    kinds: bytes
    properties: list[tuple[str, str, bool, str, bool]]
    tensor_properties: bytes
    tensor_ndims: bytes
    tensor_shapes: bytes
    tensor_chunks: bytes
    chunk_offsets: bytes
    chunk_lengths: bytes

    def entries(self) -> Iterator[tuple[str, int | None, list[int], list[tuple[list[int], list[int]]]]]:
        """Each key in order: the number of its properties, its shape, its chunks (offsets, lengths).

        For an object there are no properties. A key has one item for each chunk, an object has one.
        """
        directory = Directory(self)
        for number, (key, kind) in enumerate(zip(self.keys, self.kinds, strict=True)):
            properties = None if kind == OBJECT else directory.properties[number]
            yield key, properties, directory.shape(number), directory.boxes(number)

    def all_are_whole(self) -> bool:
        """Whether every tensor is one chunk: what most states with many keys are."""
        return (
            self.chunk_lengths == self.tensor_shapes
            and self.tensor_chunks == (1).to_bytes(4, "little") * len(self.tensor_ndims)
            and not any(self.chunk_offsets)
        )


class Directory:
    """Where each key's part of the columns begins, by the key's number; for looking at single keys.

    Args:
        columns: The columns.
        numbers: Other names for the keys' numbers than the columns have, or names for some of them only.

    Attributes:
        columns: The columns.
        numbers: Each key's number.
        row: The number of its first item; its chunks' items follow each other.
        ndim: The number of its dimensions; 0 for an object.
        count: The number of its chunks; 0 for an object.
        properties: The number of its properties; 0 for an object.
        shape_at: Where its shape begins.
        box_at: Where the offsets, and the lengths, of its first chunk begin.
        shapes: The columns themselves, as integers.
        offsets: See above.
        lengths: See above.
    """

    def __init__(self, columns: Description, numbers: dict[str, int] | None = None) -> None:
        self.columns = columns
        self._given = numbers
        self.numbers = numbers or dict(zip(columns.keys, itertools.count(), strict=False))
        self.kinds = columns.kinds
        count = ints(columns.tensor_chunks, "I").tolist()
        properties = ints(columns.tensor_properties, "I").tolist()
        ndim = list(columns.tensor_ndims)
        rows = count
        if any(columns.kinds):
            count, properties, ndim = (_spread(values, columns.kinds) for values in (count, properties, ndim))
            # OBJECT is 1, and an object has one item.
            rows = list(map(add, count, columns.kinds))
        self.count, self.properties, self.ndim = count, properties, ndim
        self.row = [0, *itertools.accumulate(rows)]
        self.shape_at = [0, *itertools.accumulate(ndim)]
        self.box_at = [0, *itertools.accumulate(map(mul, count, ndim))]
        self.shapes = ints(columns.tensor_shapes, "q").tolist()
        self.offsets = ints(columns.chunk_offsets, "q")
        self.lengths = ints(columns.chunk_lengths, "q")

    def __reduce__(self) -> Any:
        return Directory, (self.columns, self._given)

    @property
    def item_count(self) -> int:
        """How many items the keys have that it knows."""
        if self._given is None:
            return self.row[-1]
        return sum(self.row[number + 1] - self.row[number] for number in self._given.values())

    def shape(self, number: int) -> list[int]:
        """The shape of a key's tensor."""
        return self.shapes[self.shape_at[number] : self.shape_at[number + 1]]

    def layout(self, number: int) -> tuple[Any, ...]:
        """Something that is equal for tensors of one shape that are divided into the same chunks."""
        begin, end = 8 * self.box_at[number], 8 * self.box_at[number + 1]
        offsets, lengths = self.columns.chunk_offsets[begin:end], self.columns.chunk_lengths[begin:end]
        return self.count[number], *self.shape(number), offsets, lengths

    def boxes(self, number: int) -> list[tuple[list[int], list[int]]]:
        """The chunks of a key's tensor: offsets and lengths of each."""
        ndim, begin, end = self.ndim[number], self.box_at[number], self.box_at[number + 1]
        if not ndim:
            return [([], [])] * self.count[number]
        offsets, lengths = self.offsets[begin:end].tolist(), self.lengths[begin:end].tolist()
        return [(offsets[at : at + ndim], lengths[at : at + ndim]) for at in range(0, end - begin, ndim)]


def _spread(values: list[int], kinds: bytes) -> list[int]:
    """Turn a column with an entry for each tensor into one for each key; 0 for an object."""
    following = iter(values)
    return [0 if kind else next(following) for kind in kinds]


def ints(column: bytes, typecode: Literal["q", "I", "B"]) -> "memoryview[int]":
    """A column as a sequence of integers, without copying it."""
    return memoryview(column).cast("B").cast(typecode)


def column(values: Iterable[float], typecode: str) -> bytes:
    """Numbers as a column."""
    return array(typecode, values).tobytes()


def numbered(values: Iterable[H]) -> tuple[list[H], list[int]]:
    """The different values in the order in which they come, and for each value its number among them."""
    numbers: dict[H, int] = {}
    used = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), used


def concatenated(rows: Iterable[Sequence[int]]) -> Iterable[int]:
    """The numbers of rows of different lengths, one after the other, as the columns keep them."""
    return itertools.chain.from_iterable(rows)


def find_bad_box(columns: Description) -> str | None:
    """The first chunk that reaches outside of its tensor, in words; None if there is none."""
    shapes = ints(columns.tensor_shapes, "q")
    is_small = max(shapes, default=0) ** max(columns.tensor_ndims, default=0) < 1 << 60
    if is_small and not any(_overhangs(columns, shapes)):
        return None
    for key, _, shape, chunks in columns.entries():
        for offsets, lengths in chunks:
            for extent, offset, length in zip(shape, offsets, lengths, strict=True):
                if offset + length > extent:
                    return f"a chunk of {key} at {offsets} reaches outside the shape {shape}"
        if math.prod(shape) >= 1 << 60:
            return f"{key} has an impossible shape {shape}"
    return None


def _overhangs(columns: Description, shapes: "memoryview[int]") -> Iterable[bool]:
    """For each number of each box whether it reaches too far: a pass in C over all chunks."""
    ends = map(add, ints(columns.chunk_offsets, "q"), ints(columns.chunk_lengths, "q"))
    counts = ints(columns.tensor_chunks, "I")
    if set(counts) <= {1}:
        return map(gt, ends, shapes)
    starts = itertools.accumulate(columns.tensor_ndims, initial=0)
    extents = (
        shapes[start : start + ndim].tolist() * count
        for start, ndim, count in zip(starts, columns.tensor_ndims, counts, strict=False)
    )
    return map(gt, ends, concatenated(extents))
