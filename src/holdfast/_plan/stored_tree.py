"""What a checkpoint has below a path, as a nested state of metadata entries."""

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast._plan.flatten import Path, containers_of, unflatten
from holdfast.metadata import Metadata

__all__ = ["outermost_key", "stored_subclasses", "stored_tree"]


def stored_tree(metadata: Metadata, path: Sequence[Any]) -> Any:
    """The nested state below ``path``, with the metadata of each leaf in its place; None if there is nothing.

    Keys have their types, if Holdfast wrote the checkpoint; torch keeps them as strings.
    """
    names, depth = tuple(map(str, path)), len(path)
    paths: dict[str, Path] = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    below = "".join(f"{name}." for name in names)
    leaves, ways = {}, {}
    for key in metadata.state_dict_metadata:
        if key.startswith(below) and tuple(map(str, (way := paths.get(key, ()))[:depth])) == names:
            leaves[key] = metadata.state_dict_metadata[key]
            ways[key] = ("tree", *way[depth:])
    containers = {
        ("tree", *way[depth:]): container
        for way, container in containers_of(paths).items()
        if tuple(map(str, way[:depth])) == names
    }
    return unflatten(leaves, ways, containers).get("tree")


def stored_subclasses(metadata: Metadata) -> dict[str, Path]:
    """The tensors that a checkpoint has as their parts: flat keys, each with its path."""
    return {
        ".".join(map(str, path)): path
        for path, container in containers_of(metadata.planner_data).items()
        if container.tensor is not None
    }


def outermost_key(key: str, subclasses: Mapping[str, Path]) -> str:
    """The key of the tensor that a stored value is a part of; the key itself if it is none.

    Args:
        key: The flat key of the value.
        subclasses: The result of ``stored_subclasses``.
    """
    if subclasses:
        for end in (number for number, letter in enumerate(key) if letter == "."):
            if key[:end] in subclasses:
                return key[:end]
    return key
