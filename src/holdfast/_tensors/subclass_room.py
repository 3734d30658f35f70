"""Tensors of a subclass, made from what a checkpoint says of them, with the layout of a parameter."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from holdfast._tensors.dtensors import held_pieces, narrowed
from holdfast._tensors.tensor_parts import TensorParts, put_together, take_apart
from holdfast.errors import PlanError
from holdfast.metadata import TensorStorageMetadata


def make_subclass(stored: TensorParts, parameter: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """A tensor of the class whose parts a checkpoint has, without values.

    Args:
        stored: The parts, each as its metadata.
        parameter: The parameter that it is for. If that is a DTensor of the same shape, so is the result.
        device: Where to make it.

    Raises:
        PlanError: Its class is not imported, or cannot be divided as the parameter is.
    """
    whole = stored.with_parts(_on_meta).rebuild()
    if not isinstance(parameter, DTensor) or parameter.shape != whole.shape:
        return _with_memory(whole, device)
    pieces = held_pieces(parameter)
    local = torch.empty(0, dtype=whole.dtype, device=device)
    if len(pieces) == 1:
        try:
            cut = narrowed(whole, pieces[0].offsets, pieces[0].lengths)
        except Exception as error:
            raise _indivisible(stored, str(error)) from error
        local = _with_memory(cut, device)
    elif pieces:
        raise _indivisible(stored, "each rank holds several boxes of the parameter")
    return as_parameter_is(local, parameter, TensorMeta(whole.shape, whole.stride(), whole.dtype))


def as_parameter_is(local: torch.Tensor, parameter: DTensor, whole: TensorMeta | None = None) -> DTensor:
    """Make a DTensor, divided as a parameter is, around this rank's part of it.

    Args:
        local: What this rank holds.
        parameter: The parameter.
        whole: Shape, stride and dtype of the whole; by default the parameter's, with the dtype of ``local``.
    """
    about = whole or TensorMeta(parameter.shape, parameter.stride(), local.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=about)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _on_meta(stored: Any) -> torch.Tensor | None:
    if not isinstance(stored, TensorStorageMetadata):
        return None  # the class will not take it
    return torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")


def _indivisible(stored: TensorParts, reason: str) -> PlanError:
    return PlanError(
        f"a {stored.class_name} cannot be made for a parameter that is divided over ranks: {reason}. Let the "
        "optimizer take a step before the load, so that it makes its own"
    )


def _with_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    parts = take_apart(tensor, "?")
    return put_together(tensor, parts.with_parts(lambda part: torch.empty_like(part, device=device)))
