"""The door between us and torch's checkpoint package: plugins of either side work with the other."""

from holdfast._torch_compat.torch_plugins import (
    our_load_planner,
    our_save_planner,
    our_storage_reader,
    our_storage_writer,
)
from holdfast._torch_compat.torch_records import (
    called_by_torch,
    called_by_torch_without_cached_plans,
    serves_torch,
    to_ours,
    to_torch,
)

__all__ = [
    "called_by_torch",
    "called_by_torch_without_cached_plans",
    "our_load_planner",
    "our_save_planner",
    "our_storage_reader",
    "our_storage_writer",
    "serves_torch",
    "to_ours",
    "to_torch",
]
