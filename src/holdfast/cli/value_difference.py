"""By how much two values of checkpoints differ, in bounded memory."""

from typing import Any

import torch

from holdfast._format.dtypes import DTYPES
from holdfast._geometry import Box, row_major_boxes
from holdfast._view.saved_tensor import SavedTensor

__all__ = ["difference_of"]

_MOST_READ = 256 << 20
_MOST_ELEMENTS = 4 << 20
"""How many elements are compared at once: as float64 they take eight bytes each, however small they are."""


def difference_of(one: Any, other: Any) -> dict[str, Any] | None:
    """How much two values under one key differ; None if they are equal, byte for byte.

    Tensors have the same shape and dtype. They are read and compared in pieces.
    """
    if not isinstance(one, SavedTensor) or not isinstance(other, SavedTensor):
        return None if _is_same(one, other) else {"first": repr(one)[:80], "second": repr(other)[:80]}
    total = _TensorDifference()
    box = Box((0,) * one.ndim, one.shape)
    itemsize = DTYPES[one.dtype].itemsize if one.dtype in DTYPES else 1  # the read says that it is unknown
    for offsets, lengths in row_major_boxes(box, itemsize, _MOST_READ):
        part = tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))
        first, second = (saved.torch(part).reshape(-1) for saved in (one, other))
        for begin in range(0, first.numel(), _MOST_ELEMENTS):
            total.add(first[begin : begin + _MOST_ELEMENTS], second[begin : begin + _MOST_ELEMENTS])
    return total.document()


class _TensorDifference:
    """The difference of two tensors, as far as they have been compared."""

    differing = elements = 0
    largest = distance = 0.0
    has_numbers = True

    def add(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """Compare two pieces of one dimension."""
        self.elements += one.numel()
        # By their bytes: a NaN is not equal to itself, and large integers are rounded as float64.
        first, second = (piece.view(torch.uint8).view(piece.numel(), -1) for piece in (one, other))
        if torch.equal(first, second):
            return
        self.differing += int((first != second).any(dim=1).sum())
        exact = torch.complex128 if one.is_complex() else torch.float64
        try:
            distance = (one.to(exact) - other.to(exact)).abs().nan_to_num()
        except (NotImplementedError, RuntimeError):  # torch has no numbers for this dtype
            self.has_numbers = False
            return
        self.largest = max(self.largest, float(distance.max()))
        self.distance += float(distance.sum())

    def document(self) -> dict[str, Any] | None:
        """The difference as a document; None if the tensors are equal."""
        if not self.differing:
            return None
        return {
            "differing": self.differing,
            "elements": self.elements,
            "largest": self.largest if self.has_numbers else None,
            "mean": self.distance / self.elements if self.has_numbers else None,
        }


def _is_same(one: Any, other: Any) -> bool:
    """Whether two objects are equal, whatever they hold: tensors and arrays are compared as a whole."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if hasattr(one, "dtype") and hasattr(one, "shape"):
        return bool(one.dtype == other.dtype and one.shape == other.shape and (one == other).all())
    return bool(one == other)
