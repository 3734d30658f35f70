"""Values of a state in the place of containers of a checkpoint, and the reverse."""

import functools
from collections.abc import Mapping
from typing import Any

from holdfast._contents.nested_state import Path
from holdfast._plan.flatten import container_kinds, containers_of, flat_key, paths_of
from holdfast._plan.metadata_entries import directory_of
from holdfast.metadata import Metadata


class ContainerFit:
    """Whether a state and a checkpoint have containers in the same places.

    Args:
        paths: The structure of the flat state; empty if nothing is known of it.
        metadata: The checkpoint's metadata.
    """

    def __init__(self, paths: Mapping[str, Any], metadata: Metadata) -> None:
        self._paths = paths
        self._numbers = directory_of(metadata).numbers
        self._stored = paths_of(metadata.planner_data)

    @functools.cached_property
    def _stored_kinds(self) -> dict[str, str]:
        return {flat_key(path): kind for path, kind in container_kinds(self._stored).items()}

    def why_missing(self, key: str, value: Any) -> str:
        """Why the checkpoint does not have a key of the state; nothing if containers are not the reason."""
        kind = self._stored_kinds.get(key)
        if kind is not None and value is None:
            return f"it has a {kind} here, the state None. Put there what is to be filled, such as the module"
        if kind == "list" and isinstance(value, list):
            return "it has a list with tensors or dicts here, the state a list without any"
        if kind is not None:
            return f"it has a {kind} here, the state a value of type {type(value).__name__}"
        path = self._paths.get(key, ())
        for depth in range(1, len(path)):
            if self._has_value(path[:depth]):
                kind = "list" if type(path[depth]) is int else "dict"
                return f"it has a value at {flat_key(path[:depth])}, where the state has a {kind}"
        return ""

    def unfilled(self) -> list[str]:
        """The containers of the state without a value in them, where the checkpoint has a value."""
        empty = [path for path in containers_of(self._paths) if path and self._has_value(path)]
        filled = container_kinds(dict(self._paths)) if empty else {}
        return [flat_key(path) for path in empty if path not in filled]

    def _has_value(self, path: Path) -> bool:
        key = flat_key(path)
        return key in self._numbers and self._stored.get(key) == path
