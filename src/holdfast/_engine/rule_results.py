"""The result of a PerRank's rule is put in place of the PerRank's value."""

from collections.abc import Mapping
from typing import Any

import torch

from holdfast._engine.stateful_objects import entries_of
from holdfast._model_state.exact_load import load_exactly
from holdfast.errors import DtypeMismatchError, PlanError, ShapeMismatchError
from holdfast.stateful import Stateful


def put_result(template: Any, made: Any, key: str) -> Any:
    """Put the result of a rule into the tensors, Stateful objects and containers of a template like it."""
    if isinstance(template, torch.Tensor) and not template.is_meta:
        _check_like(template, made, key)
        with torch.no_grad():
            template.copy_(made)
        return template
    if isinstance(template, torch.optim.Optimizer):
        load_exactly(template, made)
        return template
    if isinstance(template, Stateful) and not isinstance(template, type):
        template.load_state_dict(made)
        return template
    if isinstance(template, dict) and isinstance(made, Mapping):
        is_alike = template.keys() == made.keys()
    else:
        is_alike = isinstance(template, list) and isinstance(made, list) and len(template) == len(made)
    if not is_alike:
        return made
    for name, part in entries_of(made):
        template[name] = put_result(template[name], part, f"{key}.{name}")
    return template


def _check_like(template: torch.Tensor, made: Any, key: str) -> None:
    rule = f"{key}: the rule of this PerRank returned"
    if not isinstance(made, torch.Tensor):
        raise PlanError(f"{rule} a value of type {type(made).__name__} for a tensor", key=key)
    if made.shape != template.shape:
        raise ShapeMismatchError(
            f"{rule} a tensor of shape {tuple(made.shape)} for one of {tuple(template.shape)}",
            key=key,
            expected=tuple(template.shape),
            found=tuple(made.shape),
        )
    if made.dtype != template.dtype:
        raise DtypeMismatchError(
            f"{rule} a tensor of {made.dtype} for one of {template.dtype}",
            key=key,
            expected=template.dtype,
            found=made.dtype,
        )
