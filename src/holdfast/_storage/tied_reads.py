"""Owns the reading of tensors that the state has under several keys: once, or not at all."""

from collections.abc import Mapping
from typing import Any

from holdfast._plan.fit_report import FitReport
from holdfast._plan.read_columns import keys_of, plan_of_keys
from holdfast._plan.tied_tensors import tied_keys
from holdfast._storage.item_places import places_of
from holdfast.metadata import Metadata
from holdfast.planner import LoadPlan


def read_tied_once(plan: LoadPlan, state: Mapping[str, Any], metadata: Metadata) -> LoadPlan:
    """The plan without all but the last key of each tensor.

    Two reads into the same memory at the same time would be taken for damage, or leave a mix.

    Args:
        plan: What fills the state.
        state: The flat state.
        metadata: The checkpoint's metadata.

    Raises:
        PlanError: The checkpoint is known to have different values under keys of one tensor. Where it does
            not tell (others wrote it, or it was cut in other ways), the last key decides, as in torch.
    """
    groups = tied_keys(state)
    if not groups:
        return plan
    planned, places = set(keys_of(plan)), places_of(metadata)
    report, again = FitReport(), set[str]()
    for group in groups:
        *others, last = [key for key in group if key in planned] or [""]
        again.update(others)
        for key in others:
            if places is not None and places.has_same_bytes(key, last) is False:
                report.add(
                    "kind",
                    last,
                    f"the state has one tensor here and at {key}, and the checkpoint two that differ. Untie "
                    "them, or leave one of the two keys out of the state",
                )
    report.raise_if_any()
    return plan_of_keys(plan, planned - again) if again else plan
