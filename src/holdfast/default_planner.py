"""The planners that are used unless the caller brings others, under torch's names."""

from holdfast._plan.load_planner import (
    DefaultLoadPlanner,
    EmptyStateDictLoadPlanner,
    create_default_global_load_plan,
    create_default_local_load_plan,
)
from holdfast._plan.save_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
    create_default_local_save_plan,
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

# Programs that load without a state to load into know it by this name.
_EmptyStateDictLoadPlanner = EmptyStateDictLoadPlanner
