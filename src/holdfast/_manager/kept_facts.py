"""Metrics and metadata that a manager keeps with a step or a run, checked."""

import json
from collections.abc import Mapping
from typing import Any

from holdfast._steps.step_metadata import METRICS, STEP, USER
from holdfast.errors import UsageError


def facts_to_keep(
    step: int, metrics: Mapping[str, Any] | None, metadata: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The user metadata of a step's checkpoint: step, metrics and metadata.

    Raises:
        UsageError: Metrics are not numbers by name, or metadata is not a dict.
    """
    numbers = {}
    for name, value in _as_dict("metrics", metrics).items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise UsageError(f"the metric {name!r} is not a number: {error}", found=value) from None
        if not isinstance(name, str):
            raise UsageError(f"metrics have names, and {name!r} is not a text", found=name)
    return {STEP: step, METRICS: numbers, USER: _as_dict("metadata", metadata)}


def run_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The metadata of a run, as a dict that JSON can hold.

    Raises:
        UsageError: It is not a dict that JSON can hold.
    """
    if metadata is None:
        return None
    values = _as_dict("metadata", metadata)
    try:
        json.dumps(values)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"metadata of a run is kept as JSON: {error}", found=metadata) from error
    return values


def _as_dict(argument: str, values: Mapping[str, Any] | None) -> dict[str, Any]:
    if values is not None and not isinstance(values, Mapping):
        raise UsageError(
            f"{argument} must be a dict, such as {{'loss': 0.5}}, not {values!r} of type "
            f"{type(values).__name__}",
            found=values,
        )
    return dict(values or {})
