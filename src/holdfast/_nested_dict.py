"""Nested states as flat ones and back, under the names of torch's module; ``_plan/flatten`` does it."""

from typing import TYPE_CHECKING, Any, TypeAlias

from holdfast import _version
from holdfast._names_elsewhere import names_of
from holdfast._plan.flatten import containers_of, flatten, unflatten
from holdfast._tensors.chunks import is_any_tensor
from holdfast._traverse import OBJ_PATH

if not TYPE_CHECKING:
    __getattr__ = names_of(__name__, "_traverse", "metadata")

FLATTEN_MAPPING: TypeAlias = "dict[str, OBJ_PATH]"
"""The path of each flat key."""


def flatten_state_dict(state_dict: dict[Any, Any]) -> tuple[dict[str, Any], FLATTEN_MAPPING]:
    """The leaves of a nested state by flat key (``{"a": {"b": 1}}`` has ``a.b``), and the way to each.

    The mapping compares equal to torch's. It also remembers keys that are not strings, empty containers and
    OrderedDicts, so that ``unflatten_state_dict`` restores them.

    Raises:
        UsageError: Two leaves have the same flat key. It is a ValueError.
    """
    leaves, paths, _ = flatten(
        state_dict,
        is_any_tensor,
        open_every_dict=_version._derived_version != "2_3",  # noqa: SLF001 - torch's switch
    )
    return leaves, paths


def unflatten_state_dict(state_dict: dict[str, Any], mapping: FLATTEN_MAPPING) -> dict[Any, Any]:
    """The nested state that has these leaves in the places that ``mapping`` says.

    If some leaves of the mapping are missing, containers that hold none of the others are left out.

    Raises:
        KeyError: The mapping does not have a key.
    """
    paths = {key: mapping[key] for key in state_dict}
    containers = containers_of(mapping)
    if len(paths) < len(mapping):
        above = {path[:depth] for path in paths.values() for depth in range(len(path))}
        containers = {path: container for path, container in containers.items() if path in above}
    return unflatten(state_dict, mapping, containers)
