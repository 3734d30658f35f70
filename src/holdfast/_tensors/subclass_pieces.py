"""Pieces of a tensor subclass: whether what was read fits, and copied part by part, with the very bits."""

import dataclasses
from operator import sub
from typing import Any

import torch

from holdfast._geometry import Box
from holdfast._tensors.dtensors import narrowed
from holdfast._tensors.tensor_parts import leaves_of, take_apart, why_other

OTHER_BOXES = (
    "torch saved a tensor subclass here in one item for each rank, and no item holds what this rank needs. "
    "Load it with as many ranks, divided as it was saved"
)


class CommonParts:
    """Parts that several items of a tensor have for the whole of it, such as one scale, or a table."""

    def __init__(self) -> None:
        self._bits: dict[str, torch.Tensor] = {}

    def differs(self, name: str, part: torch.Tensor) -> bool:
        """Whether an item before had other bits under this name."""
        bits = part.detach().contiguous().reshape(-1).view(torch.uint8)
        return not torch.equal(self._bits.setdefault(name, bits), bits)


@dataclasses.dataclass
class SubclassPiece:
    """The part of a tensor of the state that one item fills.

    Attributes:
        key: The flat key of the tensor.
        row: The item.
        lengths: The lengths of the box that is stored.
        stored: What of that box is needed, in the box.
        target: The tensor, as far as this rank holds it.
        parts: What of the target's parts is filled: views of them.
        is_only: Whether no other item fills anything of the tensor.
    """

    key: str
    row: int
    lengths: tuple[int, ...]
    stored: Box
    target: torch.Tensor
    parts: dict[str, torch.Tensor]
    is_only: bool = False

    def for_all(self, cut: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those parts that belong to the whole tensor, and not to a box of it."""
        whole = {} if self.is_only else _leaves(self.target)
        return {name: part for name, part in cut.items() if self.parts[name] is whole.get(name)}


def inside(box: Box, outer: Box) -> Box:
    """The same elements, counted from where the outer box begins."""
    return Box(tuple(map(sub, box.offsets, outer.offsets)), box.lengths)


def parts_of_cut(tensor: torch.Tensor, box: Box) -> dict[str, torch.Tensor] | None:
    """A box of each part of a tensor; None if its class cannot be cut so, or copies when it cuts."""
    cut = _cut(tensor, box)
    if cut is None:
        return None
    whole, parts = _leaves(tensor), _leaves(cut)
    for name, part in parts.items():
        if part.shape == whole[name].shape:
            parts[name] = whole[name]  # a table for all elements, which classes copy
        elif part.untyped_storage().data_ptr() != whole[name].untyped_storage().data_ptr():
            return None
    return parts


def copy_piece(loaded: torch.Tensor, piece: SubclassPiece) -> None:
    """Copy what was read, which is known to fit, into the tensor of the state."""
    cut = _cut(loaded, piece.stored)
    assert cut is not None
    for name, part in _leaves(cut).items():
        piece.parts[name].copy_(part)


def why_no_tensor(loaded: Any, lengths: tuple[int, ...]) -> str | None:
    """Why what was read is not the tensor that the metadata describes; None if it is."""
    found = tuple(loaded.shape) if isinstance(loaded, torch.Tensor) else type(loaded).__name__
    return None if found == lengths else f"its metadata calls it a tensor of shape {lengths}; it is {found}"


def why_unfit(loaded: Any, piece: SubclassPiece, common: CommonParts) -> str | None:
    """Why what was read cannot be copied into a tensor of the state, part by part; None if it can."""
    if type(loaded) is not type(piece.target):
        kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in (type(loaded), type(piece.target))]
        return f"torch saved a {kinds[0]} here, the state has a {kinds[1]}; load it into one of its own class"
    if problem := why_no_tensor(loaded, piece.lengths):
        return problem
    stored, wanted = take_apart(loaded, piece.key).about, take_apart(piece.target, piece.key).about
    # Of a context that tells the shape it is known that it does.
    if problem := why_other({**stored, "shape": wanted["shape"]}, wanted):
        return problem
    cut = _cut(loaded, piece.stored)
    if cut is None:
        return f"a {type(loaded).__name__} cannot be cut as it must be here. {OTHER_BOXES}"
    found = _leaves(cut)
    for name, part in piece.parts.items():
        facts = [
            None if one is None else (type(one).__name__, one.dtype, tuple(one.shape))
            for one in (found.get(name), part)
        ]
        if facts[0] != facts[1]:
            return f"the checkpoint has {facts[0]} as its part {piece.key}{name}, the state {facts[1]}"
        if part.is_meta:
            return f"its part {piece.key}{name} is on the meta device here: give it memory with to_empty()"
    for name, part in piece.for_all(found).items():
        if common.differs(piece.key + name, part):
            return f"its part {piece.key}{name} is for the whole, and differs between items. {OTHER_BOXES}"
    return None


def _cut(tensor: torch.Tensor, box: Box) -> torch.Tensor | None:
    """A box of a tensor; None if its class cannot be cut so."""
    try:
        return narrowed(tensor, *box)
    except Exception:  # noqa: BLE001 - each class has its own way to say so
        return None


def _leaves(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(leaves_of("", take_apart(tensor, "?")))
