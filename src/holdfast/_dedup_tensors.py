"""The lowest rank as the writer of each item that several ranks could write, under torch's older name."""

from holdfast._dedup_save_plans import dedup_save_plans
from holdfast.planner import SavePlan

__all__ = ["dedup_tensors"]


def dedup_tensors(all_plans: list[SavePlan]) -> list[SavePlan]:
    """Keep each item that is in several plans in the first of them; the plans are not changed."""
    return dedup_save_plans(all_plans, save_to_lowest_rank=True)
