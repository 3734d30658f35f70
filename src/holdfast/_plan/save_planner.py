"""The planner that saves unless the caller brings another: any nested state, each value once, exactly."""

import dataclasses
import io
import warnings
from types import MappingProxyType
from typing import Any, Literal

import torch

from holdfast._objects import encode_object
from holdfast._objects.fingerprint import fingerprint
from holdfast._plan.flatten import Structure, flatten
from holdfast._plan.global_plan import describe, find_problems, merge
from holdfast._plan.local_plan import Offering
from holdfast._plan.plan_cache import PlanCache
from holdfast._plan.planner_values import HasOwnValues, finds_values_itself
from holdfast._plan.write_columns import WriteItems
from holdfast._tensors.chunks import (
    find_box,
    find_chunk,
    is_any_tensor,
    is_sharded,
    is_tensor,
    local_chunks,
)
from holdfast._tensors.mesh_replicas import ReplicaRanks, named_chunks
from holdfast._tensors.tensor_fingerprint import fingerprint_tensor
from holdfast.errors import InvalidPlanError
from holdfast.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from holdfast.per_rank import rank_key
from holdfast.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

__all__ = [
    "DefaultSavePlanner",
    "create_default_global_save_plan",
    "create_default_local_save_plan",
]


class DefaultSavePlanner(SavePlanner, HasOwnValues):
    """Saves any nested state, each value exactly once, exactly.

    Args:
        flatten_state_dict: Open nested dicts, and lists that hold tensors, so that each tensor is stored
            on its own. Without it only top-level tensors are, and everything else is one object.
        flatten_sharded_tensors: Accepted for compatibility: shards are always stored as chunks of their
            tensor.
        dedup_replicated_tensors: Deprecated and without effect: what several ranks hold is always
            written once.
        dedup_save_to_lowest_rank: Let the lowest rank that holds a replicated value write it, instead of
            spreading the work over the ranks.
        enable_plan_caching: Plan once, and use the plan again while nothing that it depends on changes.
        check_replicas: Compare what several ranks save under one key, unless it is sharded, and raise if
            it differs: objects and tensors of up to 64 KiB by all their bytes, larger tensors by a sample.
            ``"full"`` compares every byte, at the cost of reading it once more; False compares nothing,
            and one rank's value is kept.
    """

    mappings: dict[str, Any]
    resolvers = MappingProxyType({"resolve_data": ("resolve_data", "lookup_object", "transform_object")})

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
        *,
        check_replicas: bool | Literal["full"] = True,
    ) -> None:
        if dedup_replicated_tensors is not None:
            warnings.warn(
                "dedup_replicated_tensors has no effect: replicated values are always written once. "
                "Leave the argument out.",
                DeprecationWarning,
                stacklevel=2,
            )
        self.flatten_state_dict = flatten_state_dict
        self.flatten_sharded_tensors = flatten_sharded_tensors
        self.dedup_save_to_lowest_rank = dedup_save_to_lowest_rank
        self.mappings = {}
        self.check_replicas = check_replicas
        self._enable_plan_caching = enable_plan_caching
        self._cached_plans_key: str = type(self).__name__
        self._cache = PlanCache(self._cached_plans_key)

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,  # type: ignore[type-arg]
        storage_meta: StorageMeta | None = None,  # noqa: ARG002 - for subclasses
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the state."""
        if self.flatten_state_dict:
            state_dict, self.mappings, _ = flatten(state_dict, is_any_tensor)
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """One item for each tensor or chunk and each other value of this rank."""
        plan = create_default_local_save_plan(self.state_dict, self.is_coordinator)
        if self.flatten_state_dict:
            plan = dataclasses.replace(plan, planner_data=self.mappings)
        self.plan = plan
        if self._enable_plan_caching:
            self._cache = PlanCache(self._cached_plans_key)
            return self._cache.offer(plan)
        return plan

    def fingerprints(self) -> dict[tuple[int, ...] | None, dict[str, bytes]]:
        """What tells this rank's values from other ones, by the ranks that should have the same.

        Asked for on every rank, if there are several, after ``create_local_plan``. A value that has no
        fingerprint is not among them, nor is what no other rank holds.

        Returns:
            For None, which is all ranks, the fingerprints of values that are not sharded, by flat key. For
            the ranks that a DTensor is replicated on, those of its chunks, by key and box in words.
        """
        if not self.check_replicas:
            return {}
        everywhere: dict[str, bytes] = {}
        found: dict[tuple[int, ...] | None, dict[str, bytes]] = {None: everywhere}
        full, replicas = self.check_replicas == "full", ReplicaRanks()
        for key, value in self.state_dict.items():
            if rank_key(key) is not None:
                continue
            if is_sharded(value):
                holders = replicas.of(value)
                for name, chunk in named_chunks(key, value) if len(holders) > 1 else ():
                    found.setdefault(holders, {})[name] = fingerprint_tensor(chunk, full=full)
                continue
            mark = fingerprint_tensor(value, full=full) if is_tensor(value) else fingerprint(value)
            if mark is not None:
                everywhere[key] = mark
        return found

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Give each value to one rank, describe the whole, and check that nothing overlaps or is left out."""
        if self._enable_plan_caching:
            answers, self.global_plan, self.metadata = self._cache.merge(all_plans, self._merge)
            return answers, self.metadata
        self.global_plan, self.metadata = self._merge(all_plans)
        return self.global_plan, self.metadata

    def _merge(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        # A subclass that has its own way to find values may not know how to find parts of them.
        may_split = finds_values_itself(self, "resolve_data")
        plans, metadata = merge(all_plans, lowest_rank=self.dedup_save_to_lowest_rank, may_split=may_split)
        if self.flatten_state_dict:
            metadata = dataclasses.replace(metadata, planner_data=_merged_structure(plans))
        # A single rank may save its own shards alone: then the rest of the tensor is not its affair.
        problems = find_problems(metadata, whole=len(all_plans) > 1)
        if problems:
            raise InvalidPlanError("the global plan is not valid: " + "; ".join(problems[:16]))
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take the coordinator's plan, or the cached one if it says that nothing changed."""
        if self._enable_plan_caching:
            new_plan = self._cache.finish(new_plan)
        self.plan = new_plan
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The tensor itself, or the object in the form that it is stored in."""
        value: Any = None
        if write_item.type == WriteItemType.SHARD and write_item.tensor_data is not None:
            value = self._part(write_item.index.fqn, write_item.tensor_data.chunk)
        if value is None:
            value = self.lookup_object(write_item.index)
        data: torch.Tensor | io.BytesIO = self.transform_object(write_item, value)
        return data

    def _part(self, key: str, box: ChunkStorageMetadata) -> torch.Tensor | None:
        """The part of a chunk that is this rank's to write, if others write the rest; else None."""
        value = self.state_dict[key]
        if not is_tensor(value) or box in local_chunks(value):
            return None
        return find_box(value, key, box)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The value that ``index`` names; for a sharded tensor the local chunk. For subclasses to extend."""
        value = self.state_dict[index.fqn]
        return find_chunk(value, index) if is_tensor(value) else value

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Bring a value into the form that is stored. For subclasses to extend."""
        if write_item.type == WriteItemType.BYTE_IO:
            return encode_object(write_item.index.fqn, object)
        return object


def _merged_structure(plans: list[SavePlan]) -> Structure:
    if len(plans) == 1 and isinstance(plans[0].planner_data, Structure):
        return plans[0].planner_data
    merged = Structure()
    for plan in plans:
        merged.merge({} if plan.planner_data is None else plan.planner_data)
    return merged


def create_default_local_save_plan(state_dict: dict[str, Any], is_coordinator: bool) -> SavePlan:  # noqa: ARG001
    """What one rank offers to write: an item for each tensor, chunk and other value of a flat state.

    Values that are the same on every rank are offered by every rank; the global plan keeps one of them.
    """
    offering = Offering()
    offering.add_all(state_dict)
    return SavePlan(WriteItems(offering.columns))


def create_default_global_save_plan(
    all_plans: list[SavePlan], rewrite_index_hints: bool = True
) -> tuple[list[SavePlan], Metadata]:
    """Describe what the plans write, which must name each item once.

    Args:
        all_plans: The plans in rank order.
        rewrite_index_hints: Put each chunk's place in the metadata into its item's name, as a hint.
    """
    return describe(all_plans, rewrite_hints=rewrite_index_hints)
