"""The planners that save and load unless the caller brings others, under torch's names."""

from typing import TYPE_CHECKING, Any

from holdfast._names_elsewhere import names_of
from holdfast._plan.global_plan import find_problems
from holdfast._planners.empty_state_planner import EmptyStateDictLoadPlanner
from holdfast._planners.load_planner import (
    DefaultLoadPlanner,
    create_default_global_load_plan,
    create_default_local_load_plan,
)
from holdfast._planners.save_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from holdfast.metadata import Metadata
from holdfast.planner import SavePlan
from holdfast.planner_helpers import _create_default_metadata_only_plan

__all__ = [
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "EmptyStateDictLoadPlanner",
    "create_default_global_load_plan",
    "create_default_global_save_plan",
    "create_default_local_load_plan",
    "create_default_local_save_plan",
]

if not TYPE_CHECKING:
    __getattr__ = names_of(
        __name__,
        "_dedup_save_plans",
        "_nested_dict",
        "_sharded_tensor_utils",
        "_traverse",
        "_version",
        "metadata",
        "planner",
        "planner_helpers",
        "utils",
        "torch.distributed._shard._utils",
        "torch.distributed.tensor",
    )

# Programs that load without a state to load into know it by this name.
_EmptyStateDictLoadPlanner = EmptyStateDictLoadPlanner


def _create_default_local_metadata(state_dict: dict[str, Any]) -> Metadata:
    """The metadata that a save of a flat state would have, as far as this rank knows it; torch has it."""
    _, metadata = create_default_global_save_plan([_create_default_metadata_only_plan(state_dict)])
    return metadata


def _validate_global_plan(global_plan: list[SavePlan], metadata: Metadata) -> list[str]:
    """What is wrong with the chunks of a plan, in words; gaps count if several ranks save. torch has it."""
    return find_problems(metadata, whole=len(global_plan) > 1)
