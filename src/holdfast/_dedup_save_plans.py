"""One writer for each item that several ranks could write, under the name of torch's module."""

from typing import TYPE_CHECKING

from holdfast._names_elsewhere import names_of
from holdfast._plan import dedup
from holdfast._plan.all_plans import AllPlans
from holdfast._plan.write_columns import columns_of
from holdfast.planner import SavePlan

__all__ = ["dedup_save_plans"]

if not TYPE_CHECKING:
    __getattr__ = names_of(__name__, "planner")


def dedup_save_plans(all_plans: list[SavePlan], save_to_lowest_rank: bool = False) -> list[SavePlan]:
    """Keep each item that is in several plans in one of them; the plans are not changed.

    Args:
        all_plans: The plans in rank order.
        save_to_lowest_rank: Keep it in the plan of the lowest rank, not of the one with the least to write.

    Raises:
        InvalidPlanError: Ranks have different chunks at one place of a tensor.
    """
    table = AllPlans([columns_of(plan) for plan in all_plans])
    return dedup.dedup_save_plans(all_plans, table, lowest_rank=save_to_lowest_rank, may_split=False)
