"""The plan cache: while nothing changes, a rank sends only that its plan is the same as last time."""

import dataclasses
import itertools
import weakref
from collections.abc import Callable
from typing import Any

from holdfast._contents.nested_state import true_key
from holdfast._plan.flatten import containers_of
from holdfast.errors import InvalidPlanError
from holdfast.metadata import Metadata
from holdfast.planner import SavePlan, SavePlanner

_AS_LAST_TIME = SavePlan([], usable=False)
_numbers = itertools.count(1)


class _CacheKey(str):
    """A key that lives as long as its planner; a copy of the planner gets another one."""

    __slots__ = ("__weakref__",)

    def __deepcopy__(self, memo: Any) -> str:
        return _new_key(self.split()[0])


def new_cache_key(planner: SavePlanner) -> str:
    """A key for the plans of one planner. They are forgotten when the planner is."""
    return _new_key(type(planner).__name__)


def _new_key(name: str) -> str:
    key = _CacheKey(f"{name} {next(_numbers)}")
    weakref.finalize(key, _forget, str(key)).atexit = False
    return key


def _forget(key: str) -> None:
    for name, plans in vars(SavePlanner).items():
        if name.startswith("_cached_"):
            plans.pop(key, None)


class PlanCache:
    """The cached plans of one planner during one save. They are kept on ``SavePlanner``, as torch keeps them.

    A plan is "the same" only if everything in it is: keys and their types, boxes, shapes, dtypes and other
    properties, containers. What a rank offers is forgotten when a save begins and remembered again when it
    has been planned on all ranks. So after a save that failed anywhere, the next one sends everything. The
    coordinator remembers what it has merged last, as a rank may finish a save that fails on the coordinator.
    """

    def __init__(self, key: str) -> None:
        # A plain string: the cache must not keep the planner's own key alive.
        self.key = str(key)
        self._offered: SavePlan | None = None
        self._forgotten: SavePlan | None = None
        self._has_merged = False

    def offer(self, plan: SavePlan) -> SavePlan:
        """On each rank: what to send to the coordinator."""
        self._offered = plan
        remembered = self._forgotten = SavePlanner._cached_save_plan.pop(self.key, None)
        if remembered is None or self.key not in SavePlanner._cached_final_save_plan:
            return plan
        return _AS_LAST_TIME if _is_same(remembered, plan) else plan

    def withdraw(self) -> None:
        """On each rank: take back what was offered, for another offer in the same save."""
        if self._forgotten is not None:
            SavePlanner._cached_save_plan[self.key] = self._forgotten

    def merge(
        self,
        offers: list[SavePlan],
        merge: Callable[[list[SavePlan]], tuple[list[SavePlan], Metadata]],
    ) -> tuple[list[SavePlan], list[SavePlan], Metadata]:
        """On the coordinator: the answer to each rank, the whole plan, and the metadata."""
        self._has_merged = True
        known = SavePlanner._cached_all_plans.get(self.key)
        if known is None or len(known) != len(offers):
            known = self._from_scratch(offers)
        elif not any(offer.usable for offer in offers):
            plans, metadata = (
                SavePlanner._cached_global_plan[self.key],
                SavePlanner._cached_metadata[self.key],
            )
            return [_AS_LAST_TIME] * len(offers), plans, dataclasses.replace(metadata)
        before = SavePlanner._cached_global_plan.get(self.key, [])
        whole = [new if new.usable else old for new, old in zip(offers, known, strict=True)]
        plans, metadata = merge(whole)
        SavePlanner._cached_all_plans[self.key] = whole
        SavePlanner._cached_global_plan[self.key] = plans
        SavePlanner._cached_metadata[self.key] = metadata
        # Only a rank that said "as last time" is sure to have last time's plan.
        answers = [
            _AS_LAST_TIME if not offer.usable and rank < len(before) and before[rank] == plan else plan
            for rank, (offer, plan) in enumerate(zip(offers, plans, strict=True))
        ]
        # Storages write into it, so that each save has its own.
        return answers, plans, dataclasses.replace(metadata)

    def _from_scratch(self, offers: list[SavePlan]) -> list[SavePlan]:
        """The plans behind "as last time" if this coordinator has not merged any before."""
        if len(offers) == 1 and self._offered is not None:
            return [self._offered]
        unknown = [rank for rank, offer in enumerate(offers) if not offer.usable]
        if unknown:
            raise InvalidPlanError(
                f"ranks {unknown} offer the plan of an earlier save that this coordinator has not seen. "
                "They have forgotten it now: save again."
            )
        return offers

    def finish(self, answer: SavePlan) -> SavePlan:
        """On each rank: the plan to carry out. All ranks have planned now, and remember."""
        final = answer
        if not answer.usable:
            final = SavePlanner._cached_final_save_plan[self.key]
            if answer.storage_data is not None:
                # What the storage has noted is of this save; the cached plan has the notes of another.
                final = dataclasses.replace(final, storage_data=answer.storage_data)
        assert self._offered is not None
        SavePlanner._cached_final_save_plan[self.key] = final
        SavePlanner._cached_save_plan[self.key] = self._offered
        if not self._has_merged:
            # Another rank has merged newer plans than this one may have done before.
            for merged in (
                SavePlanner._cached_all_plans,
                SavePlanner._cached_global_plan,
                SavePlanner._cached_metadata,
            ):
                merged.pop(self.key, None)
        return final


def _is_same(left: SavePlan, right: SavePlan) -> bool:
    return left == right and _shape_of(left.planner_data) == _shape_of(right.planner_data)


def _shape_of(planner_data: Any) -> Any:
    """Types of keys and kinds of containers, which ``==`` of dicts does not compare."""
    if not isinstance(planner_data, dict):
        return planner_data
    keys = [
        [(type(true_key(step)), true_key(step)) for step in path]
        for path in planner_data.values()
        if isinstance(path, tuple)
    ]
    containers = containers_of(planner_data)
    return keys, [([(type(true_key(s)), true_key(s)) for s in p], kind) for p, kind in containers.items()]
