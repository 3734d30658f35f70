"""Whether a checkpoint fits a state: every key, shape, dtype and kind, before a byte is read."""

import logging
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from holdfast._plan.report import Report
from holdfast._tensors.chunks import global_shape, is_sharded, is_tensor
from holdfast.metadata import Metadata, TensorStorageMetadata

__all__ = ["Fit", "check_fit"]

logger = logging.getLogger(__name__)
_MOST_NAMED = 20


@dataclass(frozen=True)
class Fit:
    """How closely a checkpoint must fit; see ``DefaultLoadPlanner`` for the meanings."""

    allow_missing: bool = False
    refuse_unexpected: bool | None = None
    cast: bool | None = None


def check_fit(state: dict[str, Any], metadata: Metadata, fit: Fit) -> list[str]:
    """The keys of the state that are to be loaded.

    Raises:
        PlanError: Something does not fit; it lists everything that does not, over all keys.
    """
    stored = metadata.state_dict_metadata
    report, narrowed, wanted = Report(), list[str](), list[str]()
    for key, value in state.items():
        entry = stored.get(key)
        if entry is None:
            if not fit.allow_missing:
                report.add_missing(key, stored)
            continue
        wanted.append(key)
        if isinstance(entry, TensorStorageMetadata):
            # What nearly all of 100,000 tensors are: the same on both sides.
            if (
                type(value) is torch.Tensor
                and value.shape == entry.size
                and value.dtype is entry.properties.dtype
                and value.layout is torch.strided
                and value.is_contiguous()
            ):
                continue
            _check_tensor(key, entry, value, fit.cast, report, narrowed)
        elif is_tensor(value):
            report.kind.append((key, "the checkpoint has an object here, the state a tensor"))
    _check_unexpected(state, metadata, fit, report)
    report.raise_if_any()
    if narrowed:
        listed = "; ".join(narrowed[:_MOST_NAMED])
        more = f"; and {len(narrowed) - _MOST_NAMED} more" if len(narrowed) > _MOST_NAMED else ""
        warnings.warn(
            f"tensors are cast on load: {listed}{more}. cast=True says it is meant, cast=False raises.",
            stacklevel=2,
        )
    return wanted


def _check_tensor(
    key: str,
    entry: TensorStorageMetadata,
    value: Any,
    cast: bool | None,
    report: Report,
    narrowed: list[str],
) -> None:
    if not is_tensor(value):
        report.kind.append(
            (key, f"the checkpoint has a tensor here, the state a value of type {type(value).__name__}")
        )
        return
    shape = global_shape(value)
    if shape != entry.size:
        report.shape.append(
            (key, f"Size mismatch: the checkpoint has shape {tuple(entry.size)}, the state {tuple(shape)}")
        )
    if isinstance(value, torch.Tensor) and not is_sharded(value) and _repeats_memory(value):
        report.kind.append(
            (key, "the state's tensor is expanded: several elements share one place in memory")
        )
    dtype = entry.properties.dtype
    if dtype == value.dtype or cast is True:
        return
    if cast is False or _kind(dtype) != _kind(value.dtype):
        report.dtype.append(
            (key, f"the checkpoint has {dtype}, the state {value.dtype}; pass cast=True to cast it")
        )
    else:
        narrowed.append(f"{key} from {dtype} to {value.dtype}")


def _repeats_memory(tensor: torch.Tensor) -> bool:
    return any(step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True))


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "float"
    return "bool" if dtype == torch.bool else "int"


def _check_unexpected(state: dict[str, Any], metadata: Metadata, fit: Fit, report: Report) -> None:
    if fit.refuse_unexpected is False:
        return
    unexpected = [key for key in metadata.state_dict_metadata if key not in state]
    if fit.refuse_unexpected:
        report.unexpected += [
            (key, "is in the checkpoint, but not in the state; strict=False ignores it") for key in unexpected
        ]
        return
    # A program that loads only its model from a checkpoint of model and optimizer means it. A key below
    # a container that is being loaded was more likely forgotten: a momentum buffer, a buffer of a module.
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    roots = {_root(key, paths) for key in state}
    forgotten = [key for key in unexpected if _root(key, paths) in roots and len(paths.get(key, ())) > 1]
    if forgotten:
        listed = ", ".join(forgotten[:_MOST_NAMED])
        more = f" and {len(forgotten) - _MOST_NAMED} more" if len(forgotten) > _MOST_NAMED else ""
        logger.warning(
            "%d values of the checkpoint are not loaded, though their neighbours are: %s%s. "
            "strict=True raises instead, strict=False says nothing.",
            len(forgotten),
            listed,
            more,
        )


def _root(key: str, paths: dict[str, Any]) -> str:
    path = paths.get(key)
    return str(path[0]) if path else key.split(".", 1)[0]
