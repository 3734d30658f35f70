"""Parts of a checkpoint, below given paths, as nested states of metadata entries."""

from collections.abc import Iterable, Sequence
from typing import Any

from holdfast._contents.nested_state import Container, Path
from holdfast._plan.flatten import containers_of, flat_key, paths_of, unflatten
from holdfast._plan.metadata_entries import entries_apart
from holdfast.metadata import Metadata

__all__ = ["stored_subclasses", "stored_trees"]


def stored_trees(metadata: Metadata, paths: Iterable[Sequence[Any]]) -> dict[tuple[str, ...], Any]:
    """The nested state below each path, by the path as text, with the metadata of each leaf in its place.

    A path below which there is nothing is left out. The keys of the checkpoint are gone through once, however
    many paths there are.

    Keys have their types, if Holdfast wrote the checkpoint; torch keeps them as strings.
    """
    wanted = {tuple(map(str, path)) for path in paths}
    depths = sorted({len(names) for names in wanted})
    # Most keys of a checkpoint are below no path, which their first step tells.
    roots = {names[0] for names in wanted if names}
    known = paths_of(metadata.planner_data)
    leaves: dict[tuple[str, ...], dict[str, Path]] = {}
    containers: dict[tuple[str, ...], dict[Path, Container]] = {}

    def above(way: Path) -> Iterable[tuple[tuple[str, ...], Path]]:
        if way and (() in wanted or str(way[0]) in roots):
            for depth in depths:
                if (names := tuple(map(str, way[:depth]))) in wanted:
                    yield names, ("tree", *way[depth:])

    every = entries_apart(metadata)
    for key in every:
        for names, way in above(known.get(key, ())):
            leaves.setdefault(names, {})[key] = way
    for path, container in containers_of(known).items():
        for names, way in above(path):
            containers.setdefault(names, {})[way] = container
    trees = {}
    for names in leaves.keys() | containers.keys():
        ways = leaves.get(names, {})
        trees[names] = unflatten({key: every[key] for key in ways}, ways, containers.get(names, {}))["tree"]
    return trees


def stored_subclasses(metadata: Metadata) -> dict[str, Path]:
    """The tensors that a checkpoint has as their parts: flat keys, each with its path."""
    return {
        flat_key(path): path
        for path, container in containers_of(metadata.planner_data).items()
        if container.tensor is not None
    }
