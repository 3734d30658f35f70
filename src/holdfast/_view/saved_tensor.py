"""A tensor of a checkpoint that is read when it is indexed."""

from collections.abc import Iterator, Sequence
from operator import add
from typing import Any

from holdfast._contents.box_target import StoredBox
from holdfast._contents.inventory import Ints, TensorEntry
from holdfast._contents.value_reader import TensorPart, ValueReader
from holdfast._format.dtypes import DTYPES
from holdfast._geometry import Box, cover_of, intersect, row_major_strides, volume
from holdfast._human_units import shape_text, size_text
from holdfast._view.array_kinds import Arrays, Framework, NumpyArrays, TorchArrays, arrays_of
from holdfast._view.indexing import IndexedBox, select
from holdfast.errors import IncompleteCheckpointError, MetadataFormatError

# Rows that are further apart than this are read one by one: what lies between them is not needed.
_FAR_APART = 2 << 20


class SavedTensor:
    """A tensor of a checkpoint. Nothing of it is read until it is indexed.

    ``saved[10:20, :]`` reads these rows and checks them. It returns a tensor of torch, or an array of numpy
    if the checkpoint was opened with ``framework="numpy"``. ``saved[...]`` is the whole tensor. An index is
    made of integers, slices with positive steps, and ``...``. What is returned is the caller's alone.

    Only the needed bytes are read, and, to check them, the rest of the blocks of 1 MiB that they lie in.

    Any number of threads may read at the same time.

    Attributes:
        key: Its flat key.
        shape: Its shape.
        dtype: The name of its dtype, such as ``"bfloat16"``.
        nbytes: The bytes of its elements; None for a dtype that this version does not know.
    """

    def __init__(self, entry: TensorEntry, reader: ValueReader, framework: Framework) -> None:
        self._entry = entry
        self._reader = reader
        self._framework = framework
        self.key = entry.key
        self.shape = entry.shape
        self.dtype = entry.dtype
        self.nbytes = entry.nbytes

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""
        return len(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        """Read a part of it.

        Raises:
            IndexError: An integer is out of range, or there are too many.
            UsageError: It is an index of another kind; or the view is closed; or numpy has no such dtype.
            IntegrityError: What was read is damaged.
            IncompleteCheckpointError: A file is missing.
        """
        return self._read(arrays_of(self._framework), index)

    def torch(self, index: Any = ...) -> Any:
        """The whole tensor, or what an index selects, as a tensor of torch in the memory of the host."""
        return self._read(TorchArrays(), index)

    def numpy(self, index: Any = ...) -> Any:
        """The whole tensor, or what an index selects, as an array of numpy. torch is not imported.

        Raises:
            UsageError: numpy has no such dtype. For bfloat16 and float8 install ml_dtypes.
        """
        return self._read(NumpyArrays(), index)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """For ``numpy.asarray``."""
        if copy is False:
            raise ValueError("a stored tensor cannot become an array without being read")
        found = self.numpy()
        return found if dtype is None else found.astype(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        """For ``torch.as_tensor``, which otherwise takes it for a list of tensors."""
        return self.torch().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # what is read lies in the memory of the host

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(
            f"{name}: a stored tensor does not have it, and is not read yet. Read it first: [...] is the "
            "whole tensor, [:10] the first rows"
        )

    def __repr__(self) -> str:
        chunks = self._entry.chunk_count
        parts = "" if chunks == 1 else f", {chunks} chunks"
        what = f"{self.dtype} {shape_text(self.shape)} {size_text(self.nbytes)}"
        return f"<SavedTensor {self.key!r} {what}{parts}>"

    def _read(self, arrays: Arrays, index: Any) -> Any:
        wanted = select(self.shape, index)
        array, parts = plan_read(self._entry, wanted, arrays)
        self._reader.read(parts)
        return _finished(array, wanted)


def plan_read(entry: TensorEntry, wanted: IndexedBox, arrays: Arrays) -> tuple[Any, list[TensorPart]]:
    """Memory for what is selected of a tensor, and the parts to be read into it.

    Raises:
        MetadataFormatError: This version does not know the dtype.
        IncompleteCheckpointError: No file has all of it.
    """
    if entry.dtype not in DTYPES:
        raise MetadataFormatError(
            f"{entry.key}: this version does not know the dtype {entry.dtype}. Update holdfast to read it.",
            key=entry.key,
            found=entry.dtype,
        )
    _refuse_lies(entry)
    box, origin = wanted.box, (0,) * len(entry.shape)
    is_by_rows = wanted.steps[:1] > (1,) and set(wanted.steps[1:]) <= {1}
    row_nbytes = volume(entry.shape[1:]) * DTYPES[entry.dtype].itemsize
    if is_by_rows and (wanted.steps[0] - 1) * row_nbytes >= _FAR_APART:
        array = arrays.empty(wanted.shape, entry.dtype)
        parts: list[TensorPart] = []
        for number in range(wanted.shape[0]):
            row = Box((box.offsets[0] + number * wanted.steps[0], *box.offsets[1:]), (1, *box.lengths[1:]))
            at = (number, *origin[1:])
            parts += _find_parts(entry, row, arrays, array, at=at)
        return array, parts
    array = arrays.empty(box.lengths, entry.dtype)
    return array, _find_parts(entry, box, arrays, array, at=origin)


def _find_parts(entry: TensorEntry, box: Box, arrays: Arrays, array: Any, *, at: Ints) -> list[TensorPart]:
    """The parts of stored chunks that make up a box of a tensor.

    Args:
        entry: The tensor.
        box: What is wanted of it.
        arrays: Knows the array.
        array: What is filled.
        at: Where the box begins in the array.

    Raises:
        IncompleteCheckpointError: No file has all of it.
    """
    parts: list[TensorPart] = []
    covered: list[Box] = []
    for chunk in entry.chunks:
        found = intersect(Box(chunk.offsets, chunk.lengths), box)
        if found is None:
            continue
        if chunk.item is None:
            raise _incomplete(entry.key, f"its chunk at {list(chunk.offsets)} is stored nowhere")
        inside = Box(_minus(found.offsets, chunk.offsets), found.lengths)
        part = Box(_minus(found.offsets, box.offsets), found.lengths)
        covered.append(part)
        where = Box(tuple(map(add, at, part.offsets)), part.lengths)
        target = arrays.target(entry.key, array, where)
        parts.append(
            TensorPart(
                StoredBox(
                    chunk.item, chunk.lengths, row_major_strides(chunk.lengths), entry.dtype, inside, target
                )
            )
        )
    wanted = volume(box.lengths)
    if wanted and not (len(parts) == 1 and volume(covered[0].lengths) == wanted):
        hole = cover_of(box.lengths, covered)
        if hole is not None:
            offsets = [a + b for a, b in zip(hole.offsets, box.offsets, strict=True)]
            raise _incomplete(entry.key, f"no chunk has {list(hole.lengths)} elements from {offsets} on")
    return parts


def _minus(one: Sequence[int], other: Sequence[int]) -> Ints:
    return tuple(a - b for a, b in zip(one, other, strict=True))


def _incomplete(key: str, problem: str) -> IncompleteCheckpointError:
    return IncompleteCheckpointError(
        f"{key}: {problem}: the save was not complete. Load another checkpoint.", key=key
    )


def _finished(array: Any, wanted: IndexedBox) -> Any:
    """Apply the steps and integers of the index to the array that was read."""
    if tuple(array.shape) != wanted.shape:
        array = array[tuple(slice(None, None, step) for step in wanted.steps)]
        # What lies between is not kept in memory.
        array = array.copy() if hasattr(array, "copy") else array.contiguous()
    return array[wanted.inside] if wanted.dropped else array


def _refuse_lies(entry: TensorEntry) -> None:
    """Raise before memory is taken for a tensor of which far too little is stored."""
    items = [chunk.item for chunk in entry.chunks if chunk.item is not None]
    is_known = not any(item.transform_descriptors for item in items)
    # torch stores an expanded tensor with fewer elements than it has.
    if is_known and entry.nbytes and entry.nbytes > (1 << 30) + 8 * sum(item.length for item in items):
        raise MetadataFormatError(
            f"{entry.key}: a tensor of shape {list(entry.shape)} takes {entry.nbytes} bytes, but fewer are "
            "stored",
            key=entry.key,
        )
