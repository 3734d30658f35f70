"""Plans that are used again: an unchanged second save sends nothing but the word that nothing changed."""

from collections.abc import Callable

from holdfast.metadata import Metadata
from holdfast.planner import SavePlan, SavePlanner

__all__ = ["PlanCache"]

_AS_LAST_TIME = SavePlan([], usable=False)


class PlanCache:
    """The cached plans of one planner, kept on the class ``SavePlanner`` where torch keeps them.

    A plan is "the same" only if everything in it is: keys, boxes, shapes, dtypes and other properties,
    paths. Plans enter the cache when a save has been planned on all ranks, so that a failed one leaves
    nothing half cached.
    """

    def __init__(self, key: str) -> None:
        self.key = key

    def offer(self, plan: SavePlan) -> SavePlan:
        """On each rank: what to send to the coordinator."""
        return _AS_LAST_TIME if SavePlanner._cached_save_plan.get(self.key) == plan else plan  # noqa: SLF001

    def merge(
        self,
        offers: list[SavePlan],
        merge: Callable[[list[SavePlan]], tuple[list[SavePlan], Metadata]],
    ) -> tuple[list[SavePlan], list[SavePlan], Metadata]:
        """On the coordinator: the answer to each rank, the whole plan, and the metadata."""
        known = SavePlanner._cached_all_plans.get(self.key)  # noqa: SLF001
        if known is not None and len(known) == len(offers):
            if not any(offer.usable for offer in offers):
                metadata = SavePlanner._cached_metadata[self.key]  # noqa: SLF001
                return [_AS_LAST_TIME] * len(offers), SavePlanner._cached_global_plan[self.key], metadata  # noqa: SLF001
            offers = [new if new.usable else old for new, old in zip(offers, known, strict=True)]
        before = SavePlanner._cached_global_plan.get(self.key, [])  # noqa: SLF001
        plans, metadata = merge(offers)
        SavePlanner._cached_all_plans[self.key] = offers  # noqa: SLF001
        SavePlanner._cached_global_plan[self.key] = plans  # noqa: SLF001
        SavePlanner._cached_metadata[self.key] = metadata  # noqa: SLF001
        unchanged = [len(before) == len(plans) and before[rank] == plan for rank, plan in enumerate(plans)]
        answers = [_AS_LAST_TIME if same else plan for same, plan in zip(unchanged, plans, strict=True)]
        return answers, plans, metadata

    def finish(self, answer: SavePlan, offered: SavePlan) -> SavePlan:
        """On each rank: the plan to carry out; from now on both are known."""
        final = answer if answer.usable else SavePlanner._cached_final_save_plan[self.key]  # noqa: SLF001
        SavePlanner._cached_final_save_plan[self.key] = final  # noqa: SLF001
        SavePlanner._cached_save_plan[self.key] = offered  # noqa: SLF001
        return final
