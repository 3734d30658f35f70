"""Tensor subclasses that are made of plain tensors: taken apart to be saved, and put together again.

Such a class has ``__tensor_flatten__`` and ``__tensor_unflatten__``: quantized weights, low-bit optimizer
states, float8 tensors.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from holdfast._tensors.checkpointable import has_methods
from holdfast._tensors.chunks import PLAIN_TYPES, is_tensor
from holdfast._tensors.dtensors import PartOfShard, around, held_pieces, local_tensor, own_part
from holdfast._tensors.shard_parts import divide_part, find_part_dims
from holdfast._tensors.tensor_context import (
    Model,
    decode_context,
    encode_context,
    find_imported,
    is_same_context,
    shown,
    torch_constant,
)
from holdfast.errors import PlanError

About: TypeAlias = dict[str, Any]
"""What is kept of a tensor besides its parts, as data: ``class`` (module and name), ``shape`` and ``stride``
of the whole tensor, ``dtype``, and ``context``, as ``encode_context`` makes it."""


class TensorParts(dict[str, Any]):
    """A tensor of a subclass, as its parts: a dict of tensors by the names that the class gives them.

    A part is a tensor of any kind, or the parts of one. A load without a state to load into gives this for a
    tensor whose class it must not make by itself.

    Attributes:
        about: What is known of the tensor besides.
    """

    def __init__(self, parts: Mapping[str, Any] | None = None, *, about: About) -> None:
        super().__init__(parts or {})
        self.about = about

    def __reduce__(self) -> Any:
        return _parts_as_pickled, (self.about,), None, None, iter(self.items())

    @property
    def class_name(self) -> str:
        """The class of the tensor, with its module."""
        return ".".join(map(str, self.about.get("class", ())))

    def with_parts(self, change: Callable[[Any], Any]) -> "TensorParts":
        """A copy, with ``change`` applied to each part that has no parts itself."""
        made = {
            name: part.with_parts(change) if isinstance(part, TensorParts) else change(part)
            for name, part in self.items()
        }
        return TensorParts(made, about=self.about)

    def rebuild(self) -> torch.Tensor:
        """The tensor that these are the parts of, around the very tensors that are in this dict.

        Its class must be imported already. It is not a Parameter, and does not require a gradient.

        Raises:
            PlanError: The class, or one that its context needs, is not imported, is no tensor subclass of
                this kind, or does not take these parts.
        """
        parts: dict[str, Any] = {
            name: part.rebuild() if isinstance(part, TensorParts) else part for name, part in self.items()
        }
        try:
            cls = _find_class(*self.about["class"])
            size, stride = torch.Size(self.about["shape"]), tuple(self.about["stride"])
            device = next(iter(parts.values())).device if parts else torch.device("cpu")
            like = Model(size, torch_constant(self.about["dtype"]), device)
            context = decode_context(self.about["context"], like)
            made: torch.Tensor = cls.__tensor_unflatten__(parts, context, size, stride)
        except Exception as error:
            raise PlanError(f"a tensor of the class {self.class_name} cannot be rebuilt: {error}") from error
        return made


def _find_class(module: str, name: str) -> Any:
    found = find_imported(module, name)
    if not isinstance(found, type) or not has_parts(found):
        raise TypeError(f"{module}.{name} is no tensor subclass that is made of tensors")
    return found


def _parts_as_pickled(about: About) -> TensorParts:
    return TensorParts(about=about)


@runtime_checkable
class _MadeOfTensors(Protocol):
    """torch's protocol for tensor subclasses that are made of other tensors."""

    def __tensor_flatten__(self) -> Any: ...

    def __tensor_unflatten__(self) -> Any: ...


def has_parts(kind: type) -> bool:
    """Whether the tensors of a class are made of other tensors, and are stored as these."""
    return (
        kind not in PLAIN_TYPES
        and issubclass(kind, torch.Tensor)
        and not issubclass(kind, DTensor | AsyncCollectiveTensor)
        and not has_methods(kind)
        and issubclass(kind, _MadeOfTensors)
    )


def is_made_of_parts(value: torch.Tensor) -> bool:
    """Whether a tensor, or this rank's part of a DTensor, is of such a class. Nested tensors are not."""
    inner = own_part(value)
    return has_parts(type(inner)) and is_tensor(inner)


def take_apart(value: torch.Tensor, key: str) -> TensorParts:
    """The parts of a tensor for which ``is_made_of_parts`` is true. They share its memory.

    The parts of a DTensor are DTensors, divided as the whole is. On a rank that holds nothing of it there are
    none.

    Raises:
        PlanError: Its context cannot be kept as data, or it cannot be known how a part is divided over ranks.
    """
    inner = own_part(value)
    try:
        names, context = inner.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = {name: _part(inner, name) for name in names}
        about = {
            "class": [type(inner).__module__, type(inner).__qualname__],
            "shape": list(value.shape),
            "stride": list(value.stride()),
            "dtype": str(value.dtype).removeprefix("torch."),
            "context": encode_context(context, [value.shape, inner.shape], value.dtype),
        }
    except Exception as error:
        raise _unsavable(inner, key, str(error) or repr(error)) from error
    if isinstance(value, DTensor):
        parts = _divided(value, inner, parts, key, context)
    opened = {
        name: take_apart(part, f"{key}.{name}") if is_made_of_parts(part) else part
        for name, part in parts.items()
    }
    return TensorParts(opened, about=about)


def leaves_of(key: str, parts: TensorParts) -> Iterator[tuple[str, Any]]:
    """The parts that have no parts themselves, each with its flat key."""
    for name, part in parts.items():
        if isinstance(part, TensorParts):
            yield from leaves_of(f"{key}.{name}", part)
        else:
            yield f"{key}.{name}", part


def _part(inner: torch.Tensor, name: str) -> torch.Tensor:
    part = getattr(inner, name)
    if not isinstance(part, torch.Tensor):
        raise TypeError(f"its part {name} is no tensor, but a {type(part).__name__}")
    return part


def _divided(
    value: DTensor, inner: torch.Tensor, parts: dict[str, torch.Tensor], key: str, context: Any
) -> dict[str, torch.Tensor]:
    """The parts of this rank's local tensor as parts of the whole."""
    try:
        pieces = held_pieces(value)
        if not pieces:
            return {}
        dims = find_part_dims(value, inner, parts, context)
        return {name: divide_part(value, part, pieces, dims[name]) for name, part in parts.items()}
    except PlanError as error:
        raise _unsavable(inner, key, str(error)) from None


def _unsavable(value: torch.Tensor, key: str, reason: str) -> PlanError:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    return PlanError(f"{key}: a tensor of the class {name} cannot be stored as its parts: {reason}", key=key)


def put_together(template: torch.Tensor, parts: TensorParts) -> torch.Tensor:
    """The template, if ``parts`` are still its own; otherwise a tensor like it around these parts."""
    inner = own_part(template)
    names, context = inner.__tensor_flatten__()  # type: ignore[attr-defined]
    made: dict[str, torch.Tensor] = {}
    for name in names:
        before = getattr(inner, name)
        part = parts.get(name, before)
        if isinstance(part, TensorParts):
            part = put_together(before, part)
        made[name] = local_tensor(part) if isinstance(part, PartOfShard) else part
    if all(made[name] is getattr(inner, name) for name in names):
        return template
    rebuilt: Any = type(inner).__tensor_unflatten__(made, context, inner.size(), inner.stride())  # type: ignore[attr-defined]
    if isinstance(template, DTensor):
        rebuilt = around(template, rebuilt)
    if isinstance(template, torch.nn.Parameter):
        return torch.nn.Parameter(rebuilt, requires_grad=template.requires_grad)
    return rebuilt.requires_grad_(template.requires_grad) if template.requires_grad else rebuilt  # type: ignore[no-any-return]


def why_other(stored: About, wanted: About) -> str | None:
    """How a stored tensor differs from a wanted one in its class, shape or context; None if it does not."""
    for fact in ("class", "shape"):
        if stored.get(fact) != wanted[fact]:
            found, expected = (_shown_fact(about.get(fact)) for about in (stored, wanted))
            return (
                f"the checkpoint has the parts of a tensor of the {fact} {found} here, the state {expected}"
            )
    contexts = stored.get("context"), wanted["context"]
    if is_same_context(*contexts):
        return None
    found, expected = map(shown, contexts)
    return (
        f"the checkpoint has the parts of a {wanted['class'][-1]} with the context {found} here, the state "
        f"one with {expected}"
    )


def _shown_fact(fact: Any) -> str:
    if isinstance(fact, list):
        return ".".join(map(str, fact)) if fact and isinstance(fact[0], str) else str(tuple(fact))
    return str(fact)
