"""The planners that save and load unless the caller brings others, under torch's names.

Both work on a flat state: ``_plan/flatten.py`` opens nested dicts and lists. A save is planned by
``local_plan`` (what a rank can write), ``dedup`` (one writer for what several ranks hold) and ``global_plan``
(the metadata, and the proof that no chunk overlaps or is missing); a load by ``fit`` (does the checkpoint fit
the state) and ``reshard`` (which boxes of which chunks fill it).
"""

import dataclasses
import io
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from holdfast._format.item_table import StorageInfo
from holdfast._known_methods import known_to_engine
from holdfast._objects import decode_object, encode_object
from holdfast._plan.fit import plan_load
from holdfast._plan.flatten import Container, Path, Slot, containers_of, flatten, merge_structures, unflatten
from holdfast._plan.global_plan import describe, find_problems, merge
from holdfast._plan.kept_values import refuse_reserved, rename_kept, why_not_kept
from holdfast._plan.local_plan import plan_local_save
from holdfast._plan.metadata_entries import directory_of
from holdfast._plan.plan_cache import PlanCache, new_cache_key
from holdfast._plan.planner_values import HasOwnValues, finds_values_itself
from holdfast._plan.read_columns import ReadItems, keys_of
from holdfast._plan.replica_fingerprints import fingerprint_replicas
from holdfast._plan.write_columns import WriteItems
from holdfast._tensors.chunks import (
    find_box,
    find_chunk,
    is_any_tensor,
    is_tensor,
    is_without_memory,
    local_chunks,
    local_parts,
)
from holdfast._tensors.dtensors import narrowed
from holdfast._tensors.meta_memory import MetaMemory
from holdfast.errors import InvalidPlanError, MetadataFormatError, MissingKeyError, UsageError
from holdfast.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)

__all__ = [
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "EmptyStateDictLoadPlanner",
    "create_default_global_load_plan",
    "create_default_global_save_plan",
    "create_default_local_load_plan",
    "create_default_local_save_plan",
]


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
        self._cached_plans_key: str = new_cache_key(self)
        self._cache = PlanCache(self._cached_plans_key)

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,  # type: ignore[type-arg]
        storage_meta: StorageMeta | None = None,  # noqa: ARG002 - for subclasses
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the state."""
        refuse_reserved(state_dict)
        if self.flatten_state_dict:
            state_dict, self.mappings, _ = flatten(state_dict, is_any_tensor)
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Return one item for each tensor or chunk and each other value of this rank."""
        plan = create_default_local_save_plan(self.state_dict, self.is_coordinator)
        if self.flatten_state_dict:
            plan = dataclasses.replace(plan, planner_data=self.mappings)
        self.plan = plan
        if self._enable_plan_caching:
            self._cache = PlanCache(self._cached_plans_key)
            return self._cache.offer(plan)
        return plan

    def fingerprints(self) -> dict[tuple[int, ...] | None, dict[str, bytes]]:
        """Fingerprints of the values that other ranks must hold alike, by those ranks.

        A save calls it on every rank after ``create_local_plan``, if there are several ranks. The result is
        that of ``fingerprint_replicas``; it is empty if replicas are not to be checked.
        """
        if not self.check_replicas:
            return {}
        return fingerprint_replicas(self.state_dict, full=self.check_replicas == "full")

    def keep_for_rank(self, names: Mapping[str, str]) -> dict[str, str]:
        """Save values of this rank under other names, because other ranks save other values under theirs.

        A save calls it on every rank after ``fingerprints``, if they differ, and then ``create_local_plan``
        again. For subclasses to extend, if ``state_dict`` and ``mappings`` are not all that they look into.

        Args:
            names: Flat keys of this rank, with the names that are to be saved in their place.

        Returns:
            Why values cannot be kept, by key. If any rank returns something, the save raises.
        """
        if self.check_replicas == "raise":
            return dict.fromkeys(names, "check_replicas='raise' keeps no value of a rank")
        problems = why_not_kept({key: self.state_dict[key] for key in names})
        if not problems:
            self.state_dict, renamed = rename_kept(self.state_dict, self.mappings, names)
            if self.flatten_state_dict:
                self.mappings = renamed
            self._cache.withdraw()
        return problems

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
            metadata = dataclasses.replace(
                metadata, planner_data=merge_structures([plan.planner_data for plan in plans])
            )
        # A single rank may save its own shards alone: then the other shards of the tensor may be missing.
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
        """The tensor itself, or the object as the stream that is stored."""
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


class DefaultLoadPlanner(LoadPlanner, HasOwnValues):
    """Loads into any nested state, in place, whatever layout the checkpoint has.

    Before anything is read, all that does not fit is reported together: keys, shapes, dtypes, kinds.

    Args:
        flatten_state_dict: Open nested dicts and lists as the saving planner did.
        flatten_sharded_tensors: Accepted for compatibility; see :class:`DefaultSavePlanner`.
        allow_partial_load: Leave alone what the checkpoint does not have, instead of raising.
        strict: What to do with keys of the checkpoint that the state does not have. True raises; False
            says nothing; None, the default, logs a warning where the state has the container that they
            belong to, since then they are more likely forgotten than unwanted.
        cast: What to do where dtypes differ. True casts whatever the difference; False raises; None, the
            default, casts within a kind (float32 to bfloat16) with one warning that lists the keys, and
            raises across kinds (float to int).
        ignore_mismatched_sizes: Leave alone the tensors whose shape in the checkpoint is another one,
            instead of raising. One warning that is logged lists them.
        device: Where tensors on the meta device get their memory. None for the device of the mesh of a
            DTensor, and for others the current accelerator, or the CPU if there is none.
        allow_pickle: Let objects be unpickled freely. That runs whatever code the checkpoint holds: only
            for checkpoints that you would also run as a program.
        safe_globals: Classes and functions that objects of the checkpoint may use besides the usual ones.
    """

    original_state_dict: dict[str, Any]
    mappings: dict[str, Any]
    resolvers = MappingProxyType(
        {"resolve_tensor": ("resolve_tensor", "commit_tensor", "lookup_tensor", "transform_tensor")}
    )

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        strict: bool | None = None,
        cast: bool | None = None,
        ignore_mismatched_sizes: bool = False,
        device: torch.device | str | int | None = None,
        allow_pickle: bool = False,
        safe_globals: Iterable[Callable[..., Any] | type] = (),
    ) -> None:
        self.flatten_state_dict = flatten_state_dict
        self.flatten_sharded_tensors = flatten_sharded_tensors
        self.allow_partial_load = allow_partial_load
        self.strict = strict
        self.cast = cast
        self.ignore_mismatched_sizes = ignore_mismatched_sizes
        self.device = device
        self.allow_pickle = allow_pickle
        self.safe_globals = tuple(safe_globals)
        self.original_state_dict = {}
        self.mappings = {}
        self._slots: dict[str, Slot] = {}

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,  # type: ignore[type-arg]
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the state, and remember where each leaf stands in it."""
        self.original_state_dict = state_dict
        self._flatten(open_every_dict=True)
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def _flatten(self, *, open_every_dict: bool) -> None:
        original = self.original_state_dict
        if self.flatten_state_dict:
            self.state_dict, self.mappings, self._slots = flatten(
                original, is_any_tensor, open_every_dict=open_every_dict
            )
        else:
            self.state_dict = original
            self._slots = {key: (original, key) for key in original}

    def create_local_plan(self) -> LoadPlan:
        """Return which boxes of which stored chunks fill this rank's part of the state."""
        if self.metadata is None:
            raise UsageError("the planner was set up without the checkpoint's metadata")
        self._follow_old_keys()
        return create_default_local_load_plan(
            self.state_dict,
            self.metadata,
            strict=not self.allow_partial_load,
            refuse_unexpected=self.strict,
            cast=self.cast,
            ignore_mismatched_sizes=self.ignore_mismatched_sizes,
        )

    def _follow_old_keys(self) -> None:
        """Use the flat keys of torch before 2.4 if the checkpoint has some that only that rule makes."""
        assert self.metadata is not None
        stored = directory_of(self.metadata).numbers
        if not self.flatten_state_dict or stored.keys() <= self.state_dict.keys():
            return
        now = (self.state_dict, self.mappings, self._slots)
        self._flatten(open_every_dict=False)
        if not (self.state_dict.keys() - now[0].keys()) & stored.keys():
            self.state_dict, self.mappings, self._slots = now

    @known_to_engine
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are: each rank reads what it needs."""
        return create_default_global_load_plan(global_plan)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Give memory to tensors on the meta device. Until this call the state is unchanged."""
        planned = set(keys_of(new_plan))
        stored = () if self.metadata is None else directory_of(self.metadata).numbers
        memory = MetaMemory(self.device)
        for key, value in list(self.state_dict.items()):
            if not is_without_memory(value):
                continue
            # A rank that holds no element of a sharded tensor reads nothing of it.
            holds_nothing = key in stored and not any(part.numel() for part in local_parts(value))
            if key in planned or holds_nothing:
                self.put(key, memory.give(value))
        return new_plan

    def put(self, key: str, value: Any) -> None:
        """Replace a value of the state: an object that was loaded, or a tensor that got its memory.

        For subclasses to extend, if the state that they show is not the one that the caller has.
        """
        self.state_dict[key] = value
        container, slot = self._slots.get(key, (self.state_dict, key))
        container[slot] = value

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Decode an object and put it where it stood in the state."""
        key = read_item.dest_index.fqn
        self.put(
            key,
            decode_object(key, value, allow_pickle=self.allow_pickle, safe_globals=self.safe_globals),
        )

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The box of the state's own memory that the item fills."""
        return self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index))

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor, or the local chunk of it, that ``index`` names. For subclasses to extend."""
        return find_chunk(self.state_dict[index.fqn], index)

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """Narrow the tensor to the box that the item fills. For subclasses to extend."""
        return narrowed(tensor, read_item.dest_offsets, read_item.lengths)


def _memory_for(key: str, entry: TensorStorageMetadata, places: Any) -> torch.Tensor:
    """Memory for a whole tensor, unless what is stored of it is too little to fill it."""
    nbytes = entry.size.numel() * entry.properties.dtype.itemsize
    found = [
        places[index]
        for chunk in entry.chunks
        if (index := MetadataIndex(key, chunk.offsets)) in (places or ())
    ]
    # Places belong to the storage: of those that are not ours nothing is known.
    is_known = all(isinstance(place, StorageInfo) and not place.transform_descriptors for place in found)
    if is_known and sum(place.length for place in found) < nbytes:
        raise MetadataFormatError(
            f"{key}: a tensor of shape {tuple(entry.size)} takes {nbytes} bytes, but fewer are stored",
            key=key,
        )
    return torch.empty(entry.size, dtype=entry.properties.dtype)


class EmptyStateDictLoadPlanner(DefaultLoadPlanner):
    """Loads a checkpoint without a state to load into: builds the nested state from the checkpoint.

    The ``state_dict`` given to ``load`` must be empty; it is filled. Every tensor is held whole by this
    process.

    Args:
        keys: Load only these flat keys, and whatever is below these names. None for everything.
        *args: As for :class:`DefaultLoadPlanner`.
        **kwargs: As for :class:`DefaultLoadPlanner`.
    """

    def __init__(self, keys: Iterable[str] | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keys = None if keys is None else set(keys)

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,  # type: ignore[type-arg]
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Build the state, with memory for every tensor.

        Raises:
            UsageError: The given state is not empty.
            MissingKeyError: The checkpoint has none of the keys.
        """
        if state_dict:
            raise UsageError("the state to load into must be empty: it is built from the checkpoint")
        if metadata is None:
            raise UsageError("the planner was set up without the checkpoint's metadata")
        paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        leaves = {
            key: _memory_for(key, entry, metadata.storage_data)
            if isinstance(entry, TensorStorageMetadata)
            else entry
            for key, entry in metadata.state_dict_metadata.items()
            if self.keys is None or self._is_wanted(key, paths.get(key, (key,)))
        }
        state_dict.update(unflatten(leaves, paths, self._wanted_containers(leaves, paths)))
        if self.keys and not state_dict:
            names = ", ".join(sorted(self.keys)[:20])
            raise MissingKeyError(
                f"the checkpoint has none of the keys asked for: {names}", key=min(self.keys)
            )
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if self.keys is not None and self.strict is None:
            self.strict = False

    def _wanted_containers(self, leaves: dict[str, Any], paths: dict[str, Path]) -> dict[Path, Container]:
        containers = containers_of(paths)
        if self.keys is None:
            return containers
        above = {path[:depth] for key in leaves if (path := paths.get(key)) for depth in range(len(path))}
        return {
            path: container
            for path, container in containers.items()
            if path in above or self._is_wanted(".".join(map(str, path)), path)
        }

    def _is_wanted(self, key: str, path: tuple[Any, ...]) -> bool:
        assert self.keys is not None
        names = {".".join(map(str, path[:depth])) for depth in range(1, len(path) + 1)}
        return key in self.keys or not names.isdisjoint(self.keys)


def create_default_local_load_plan(
    state_dict: dict[str, Any],
    metadata: Metadata,
    strict: bool = True,
    *,
    refuse_unexpected: bool | None = False,
    cast: bool | None = None,
    ignore_mismatched_sizes: bool = False,
) -> LoadPlan:
    """What one rank must read to fill a flat state.

    Args:
        state_dict: The flat state.
        metadata: The checkpoint's metadata.
        strict: Raise if the checkpoint lacks a key of the state; False leaves that key out.
        refuse_unexpected: As ``strict`` of :class:`DefaultLoadPlanner`.
        cast: As for :class:`DefaultLoadPlanner`.
        ignore_mismatched_sizes: As for :class:`DefaultLoadPlanner`.

    Raises:
        PlanError: Something does not fit; the error lists everything that does not.
    """
    columns = plan_load(
        state_dict,
        metadata,
        allow_missing=not strict,
        refuse_unexpected=refuse_unexpected,
        cast=cast,
        ignore_mismatched_sizes=ignore_mismatched_sizes,
    )
    return LoadPlan(ReadItems(columns))


def create_default_global_load_plan(all_plans: list[LoadPlan]) -> list[LoadPlan]:
    """Loading needs no decision for all ranks: the plans as they are."""
    return all_plans


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


# Programs that load without a state to load into know it by this name.
_EmptyStateDictLoadPlanner = EmptyStateDictLoadPlanner


def _create_default_local_metadata(state_dict: dict[str, Any]) -> Metadata:
    """The metadata that a save of a flat state by this rank alone would have; torch has this function."""
    plan = create_default_local_save_plan(state_dict, is_coordinator=True)
    _, metadata = create_default_global_save_plan([plan])
    for key, value in state_dict.items():
        if isinstance(value, ShardedTensor):
            # It knows where every shard is, also if this rank has none.
            whole = value.metadata()
            metadata.state_dict_metadata[key] = TensorStorageMetadata(
                properties=TensorProperties(dtype=whole.tensor_properties.dtype),
                size=torch.Size(whole.size),
                chunks=[
                    ChunkStorageMetadata(torch.Size(shard.shard_offsets), torch.Size(shard.shard_sizes))
                    for shard in whole.shards_metadata
                ],
            )
    return metadata


def _validate_global_plan(global_plan: list[SavePlan], metadata: Metadata) -> bool:  # noqa: ARG001
    """Whether the chunks of each tensor cover it exactly once; torch has this function."""
    return not find_problems(metadata, whole=True)
