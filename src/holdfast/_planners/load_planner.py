"""The planner that loads into a given state, unless the caller brings another one.

It works on a flat state: ``_plan/flatten.py`` opens nested dicts and lists. Then ``fit`` checks whether the
checkpoint fits the state, and ``reshard`` finds which boxes of which chunks fill it.
"""

import io
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from holdfast._known_methods import known_to_engine
from holdfast._objects.decode import decode_object
from holdfast._plan.fit import check_replacement, plan_load
from holdfast._plan.flatten import Slot, Structure, flatten
from holdfast._plan.metadata_entries import directory_of
from holdfast._plan.planner_values import HasOwnValues
from holdfast._plan.read_columns import keys_of
from holdfast._plan.tied_tensors import also_filled
from holdfast._storage.tied_reads import read_tied_once
from holdfast._tensors.chunks import find_chunk, is_any_tensor, is_without_memory, local_parts
from holdfast._tensors.dtensors import narrowed
from holdfast._tensors.layout_table import LayoutTable
from holdfast._tensors.meta_memory import MetaMemory
from holdfast._torch_compat.torch_records import serves_torch, to_ours
from holdfast.errors import UsageError
from holdfast.metadata import STATE_DICT_TYPE, Metadata, MetadataIndex
from holdfast.planner import LoadPlan, LoadPlanner, ReadItem


@dataclass(eq=False, repr=False)
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
            default, casts within a kind and raises across kinds (float to int). One warning lists the keys
            whose values may change (float32 to bfloat16); a wider dtype holds them all.
        ignore_mismatched_sizes: Leave alone the tensors whose shape in the checkpoint is another one,
            instead of raising. One warning that is logged lists them.
        device: Where tensors on the meta device get their memory. None for the device of the mesh of a
            DTensor, and for others the current accelerator, or the CPU if there is none.
        allow_pickle: Let objects be unpickled freely. That runs whatever code the checkpoint holds: only
            for checkpoints that you would also run as a program.
        safe_globals: Classes and functions that objects of the checkpoint may use besides the usual ones.
    """

    resolvers = MappingProxyType(
        {"resolve_tensor": ("resolve_tensor", "commit_tensor", "lookup_tensor", "transform_tensor")}
    )
    flatten_state_dict: bool = True
    flatten_sharded_tensors: bool = True
    allow_partial_load: bool = False
    _: KW_ONLY
    strict: bool | None = None
    cast: bool | None = None
    ignore_mismatched_sizes: bool = False
    device: torch.device | str | int | None = None
    allow_pickle: bool = False
    safe_globals: Iterable[Callable[..., Any] | type] = ()
    original_state_dict: dict[str, Any] = field(init=False, default_factory=dict)
    mappings: dict[str, Any] = field(init=False, default_factory=dict)
    _slots: dict[str, Slot] = field(init=False, default_factory=dict)
    _layouts: LayoutTable = field(init=False, default_factory=LayoutTable)

    def __post_init__(self) -> None:
        self.safe_globals = tuple(self.safe_globals)

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,  # type: ignore[type-arg]
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the state, and remember where each leaf stands in it."""
        self.original_state_dict = state_dict
        self._layouts = LayoutTable()
        self._flatten(open_every_dict=True)
        self.metadata: Metadata | None = to_ours(metadata)
        self.is_coordinator = is_coordinator

    def _opens_lists(self, value: Any) -> bool:
        """Whether a list with this value in it is flattened, as it was when it was saved."""
        return is_any_tensor(value)

    def _flatten(self, *, open_every_dict: bool) -> None:
        original = self.original_state_dict
        if self.flatten_state_dict:
            self.state_dict, self.mappings, self._slots = flatten(
                original, self._opens_lists, open_every_dict=open_every_dict
            )
        else:
            self.state_dict = original
            self._slots = {key: (original, key) for key in original}

    @serves_torch
    def create_local_plan(self) -> LoadPlan:
        """Return which boxes of which stored chunks fill this rank's part of the state."""
        if self.metadata is None:
            raise UsageError("the planner was set up without the checkpoint's metadata")
        self._follow_old_keys()
        plan = plan_load(
            self.state_dict,
            self.metadata,
            allow_missing=self.allow_partial_load,
            refuse_unexpected=self.strict,
            cast=self.cast,
            ignore_mismatched_sizes=self.ignore_mismatched_sizes,
            paths=self.mappings,
        )
        return read_tied_once(plan, self.state_dict, self.metadata)

    def _follow_old_keys(self) -> None:
        """Use the flat keys of torch before 2.4 if the checkpoint has some that only that rule makes."""
        assert self.metadata is not None
        stored = directory_of(self.metadata).numbers
        # Where Holdfast flattened, a value in the place of a dict is another rank's, or of another state.
        is_ours = isinstance(self.metadata.planner_data, Structure)
        if not self.flatten_state_dict or is_ours or stored.keys() <= self.state_dict.keys():
            return
        now = (self.state_dict, self.mappings, self._slots)
        self._flatten(open_every_dict=False)
        if not (self.state_dict.keys() - now[0].keys()) & stored.keys():
            self.state_dict, self.mappings, self._slots = now

    @known_to_engine
    @serves_torch
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are: each rank reads what it needs."""
        return create_default_global_load_plan(global_plan)

    @serves_torch
    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Give memory to tensors on the meta device. Until this call the state is unchanged."""
        waiting = [(key, value) for key, value in self.state_dict.items() if is_without_memory(value)]
        if not waiting:
            return new_plan
        planned = set(keys_of(new_plan))
        stored = () if self.metadata is None else directory_of(self.metadata).numbers
        # A rank that holds no element of a sharded tensor reads nothing of it.
        planned |= {
            key
            for key, value in waiting
            if key in stored and not any(part.numel() for part in local_parts(value))
        }
        planned |= also_filled(self.state_dict, planned)
        memory = MetaMemory(self.device)
        for key, value in waiting:
            if key in planned:
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
        key = read_item.dest_index.fqn  # torch's record has the same
        safe_globals = tuple(self.safe_globals)
        loaded = decode_object(key, value, allow_pickle=self.allow_pickle, safe_globals=safe_globals)
        check_replacement(key, self.state_dict.get(key), loaded)
        self.put(key, loaded)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The box of the state's own memory that the item fills."""
        item = to_ours(read_item)
        return self.transform_tensor(item, self.lookup_tensor(item.dest_index))

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor, or the local chunk of it, that ``index`` names. For subclasses to extend."""
        return find_chunk(self.state_dict[index.fqn], index, self._layouts)

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """Narrow the tensor to the box that the item fills. For subclasses to extend."""
        return narrowed(tensor, read_item.dest_offsets, read_item.lengths)


def create_default_local_load_plan(
    state_dict: dict[str, Any], metadata: Metadata, strict: bool = True
) -> LoadPlan:
    """What one rank must read to fill a flat state.

    Args:
        state_dict: The flat state.
        metadata: The checkpoint's metadata.
        strict: Raise if the checkpoint lacks a key of the state; False leaves that key out.

    Raises:
        PlanError: Something does not fit; the error lists everything that does not.
    """
    return plan_load(state_dict, metadata, allow_missing=not strict)


def create_default_global_load_plan(all_plans: list[LoadPlan]) -> list[LoadPlan]:
    """Loading needs no decision for all ranks: the plans as they are."""
    return all_plans
