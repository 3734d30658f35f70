"""The planner that saves unless the caller brings another one.

It works on a flat state: ``_plan/flatten.py`` opens nested dicts and lists. Then ``local_plan`` lists what a
rank can write, ``dedup`` chooses one writer for what several ranks hold, and ``global_plan`` makes the
metadata and checks that no chunk overlaps or is missing.
"""

import dataclasses
import io
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch

from holdfast._objects.encode import encode_object
from holdfast._plan.flatten import flatten, merge_structures
from holdfast._plan.global_plan import describe, find_problems, merge
from holdfast._plan.kept_values import refuse_reserved, rename_kept, why_not_kept
from holdfast._plan.local_plan import plan_local_save
from holdfast._plan.plan_cache import PlanCache, new_cache_key
from holdfast._plan.planner_values import HasOwnValues, finds_values_itself
from holdfast._plan.replica_fingerprints import fingerprint_replicas
from holdfast._plan.write_columns import WriteItems
from holdfast._tensors.checkpointable import describes_itself
from holdfast._tensors.chunks import find_box, find_chunk, is_any_tensor, is_tensor, local_chunks
from holdfast._tensors.layout_table import LayoutTable
from holdfast._torch_compat.torch_records import called_by_torch_without_cached_plans, serves_torch, to_ours
from holdfast._user_warning import warn_user
from holdfast.errors import InvalidPlanError, UsageError
from holdfast.metadata import STATE_DICT_TYPE, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta
from holdfast.planner import SavePlan, SavePlanner, WriteItem, WriteItemType


class DefaultSavePlanner(SavePlanner, HasOwnValues):
    """Saves any nested state, bit for bit, and each value once, whatever ranks hold it.

    Args:
        flatten_state_dict: Open nested dicts, and lists that hold tensors, so that each tensor is stored
            on its own. Without it only top-level tensors are, and everything else is one object.
        flatten_sharded_tensors: Accepted for compatibility: shards are always stored as chunks of their
            tensor.
        dedup_replicated_tensors: Deprecated and without effect: what several ranks hold is always
            written once.
        dedup_save_to_lowest_rank: Let the lowest rank that holds a replicated value write it, instead of
            spreading the work over the ranks.
        enable_plan_caching: Plan once, and use the plan again while nothing that it depends on changes. The
            plan belongs to this planner: pass the same one to every save.
        check_replicas: Compare what several ranks save under one key, unless it is sharded: objects and
            tensors of up to 64 KiB by all their bytes, larger tensors by a sample. Small values that differ
            are kept for each rank, with a warning; for anything else that differs the save raises.
            ``"raise"`` raises for small values too. ``"full"`` is as True, but compares every byte, at the
            cost of reading it once more. False compares nothing, and one rank's value is kept.
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
        check_replicas: bool | Literal["full", "raise"] = True,
    ) -> None:
        if check_replicas not in (True, False, "full", "raise"):
            raise UsageError(
                f"check_replicas is True, False, 'full' or 'raise', not {check_replicas!r}",
                found=check_replicas,
            )
        if dedup_replicated_tensors is not None:
            warn_user(
                "dedup_replicated_tensors has no effect: replicated values are always written once. "
                "Leave the argument out.",
                DeprecationWarning,
            )
        self.flatten_state_dict = flatten_state_dict
        self.flatten_sharded_tensors = flatten_sharded_tensors
        self.dedup_save_to_lowest_rank = dedup_save_to_lowest_rank
        self.mappings = {}
        self.check_replicas = check_replicas
        self._enable_plan_caching = enable_plan_caching
        self._cached_plans_key: str = new_cache_key(self)
        self._cache = PlanCache(self._cached_plans_key)
        self._layouts = LayoutTable()

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,  # type: ignore[type-arg]
        storage_meta: StorageMeta | None = None,  # noqa: ARG002 - for subclasses
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the state."""
        self._layouts = LayoutTable()
        refuse_reserved(state_dict)
        if self.flatten_state_dict:
            state_dict, self.mappings, _ = flatten(state_dict, is_any_tensor, is_saved=True)
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    @serves_torch
    def create_local_plan(self) -> SavePlan:
        """Return one item for each tensor or chunk and each other value of this rank."""
        plan = create_default_local_save_plan(self.state_dict, self.is_coordinator)
        if self.flatten_state_dict:
            plan = dataclasses.replace(plan, planner_data=self.mappings)
        self.plan = plan
        if self._enable_plan_caching:
            self._cache = PlanCache(self._cached_plans_key)
            offered = self._cache.offer(plan)
            return plan if called_by_torch_without_cached_plans(self) else offered
        return plan

    def fingerprints(self) -> dict[tuple[int, ...] | None, dict[str, bytes]]:
        """Fingerprints of the values that other ranks must hold alike, by those ranks.

        A save calls it on every rank after ``create_local_plan``, if there are several ranks. The result is
        that of ``fingerprint_replicas``; it is empty if replicas are not to be checked.
        """
        if not self.check_replicas:
            return {}
        return fingerprint_replicas(self.state_dict, self.mappings, full=self.check_replicas == "full")

    def keep_for_rank(self, names: Mapping[str, str]) -> dict[str, str]:
        """Save values of this rank under other names, because other ranks save other values under theirs.

        A save calls it on every rank after ``fingerprints``, if they differ, and then ``create_local_plan``
        again. For subclasses to extend, if ``state_dict`` and ``mappings`` are not all that they look into.

        Args:
            names: Flat keys of this rank, with the names that are to be saved in their place. Where another
                rank has a value or another kind of container, also the name of a dict or list, beside
                the keys of all that is in it.

        Returns:
            Why values cannot be kept, by key. If any rank returns something, the save raises.
        """
        if self.check_replicas == "raise":
            return dict.fromkeys(names, "check_replicas='raise' keeps no value of a rank")
        problems = why_not_kept({key: self.state_dict[key] for key in names if key in self.state_dict})
        if not problems:
            self.state_dict, renamed = rename_kept(self.state_dict, self.mappings, names)
            if self.flatten_state_dict:
                self.mappings = renamed
            self._cache.withdraw()
        return problems

    @serves_torch
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
            structure = merge_structures([plan.planner_data for plan in plans], metadata.state_dict_metadata)
            metadata = dataclasses.replace(metadata, planner_data=structure)
        # A single rank may save its own shards alone: then the other shards of the tensor may be missing.
        problems = find_problems(metadata, whole=len(all_plans) > 1)
        if problems:
            raise InvalidPlanError("the global plan is not valid: " + "; ".join(problems[:16]))
        return plans, metadata

    @serves_torch
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take the coordinator's plan, or the cached one if it says that nothing changed."""
        if self._enable_plan_caching:
            new_plan = self._cache.finish(new_plan)
        self.plan = new_plan
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The tensor itself, or the object as the stream that is stored."""
        write_item = to_ours(write_item)
        value: Any = None
        if write_item.type == WriteItemType.SHARD and write_item.tensor_data is not None:
            value = self._part(write_item.index.fqn, write_item.tensor_data.chunk)
        if value is None:
            value = self.lookup_object(write_item.index)
        data: torch.Tensor | io.BytesIO = self.transform_object(write_item, value)
        return data

    def _part(self, key: str, box: ChunkStorageMetadata) -> torch.Tensor | None:
        """The memory of a part of a chunk, if other ranks write the rest of the chunk; otherwise None."""
        value = self.state_dict[key]
        if not is_tensor(value) or box in local_chunks(value, self._layouts):
            return None
        return find_box(value, key, box, self._layouts)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The value that ``index`` names; for a sharded tensor the local chunk. For subclasses to extend."""
        value = self.state_dict[index.fqn]
        if not is_tensor(value) or (index.offset is None and describes_itself(value)):
            return value
        return find_chunk(value, index, self._layouts)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Bring a value into the form that is stored. For subclasses to extend."""
        if write_item.type == WriteItemType.BYTE_IO:
            return encode_object(write_item.index.fqn, object)
        return object


def create_default_local_save_plan(state_dict: dict[str, Any], is_coordinator: bool) -> SavePlan:  # noqa: ARG001
    """What one rank can write: an item for each tensor, chunk and other value of a flat state.

    A value that every rank holds is in every rank's plan; the global plan keeps one of them.
    """
    return SavePlan(WriteItems(plan_local_save(state_dict)))


def create_default_global_save_plan(
    all_plans: list[SavePlan], rewrite_index_hints: bool = True
) -> tuple[list[SavePlan], Metadata]:
    """Describe what the plans write, which must name each item once.

    Args:
        all_plans: The plans in rank order.
        rewrite_index_hints: Put each chunk's place in the metadata into its item's name, as a hint.
    """
    return describe(all_plans, rewrite_hints=rewrite_index_hints)
