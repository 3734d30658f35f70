"""Owns how the values that are taken of a source are nested in the target."""

from collections.abc import Mapping
from typing import Any

from holdfast._contents.nested_state import Path
from holdfast._format.paths import TypedKey
from holdfast._plan.flatten import Structure, flat_key
from holdfast.errors import UsageError


def new_path(name: str, path: Path) -> Path:
    """The path of a renamed key: steps at both ends that did not change stay, what is between is one step."""
    first: list[Any] = []
    last: list[Any] = []
    steps, rest = list(path), name
    while len(steps) > 1 and rest.startswith(f"{steps[0]}."):
        rest = rest[len(str(steps[0])) + 1 :]
        first.append(steps.pop(0))
    while steps and (rest == str(steps[-1]) or rest.endswith(f".{steps[-1]}")):
        rest = rest[: -len(str(steps[-1])) - 1] if rest != str(steps[-1]) else ""
        last.insert(0, steps.pop())
    return (*first, *([rest] if rest else []), *last)


def moved_containers(moved: Mapping[Path, Path]) -> dict[Path, Path]:
    """Where the containers of values go whose old and new paths are given."""
    places: dict[Path, Path] = {(): ()}
    for old, new in moved.items():
        for below in range(1, min(len(old), len(new))):
            if old[-below:] == new[-below:]:
                places.setdefault(old[:-below], new[:-below])
    return places


def move_with_neighbours(path: Path, places: Mapping[Path, Path]) -> Path:
    """Where a path goes whose containers go to ``places``."""
    depth = next(depth for depth in range(len(path), -1, -1) if path[:depth] in places)
    return places[path[:depth]] + path[depth:]


def without_gaps(structure: Structure) -> Structure:
    """Turn lists that lost entries into dicts, with the positions as keys."""
    steps: dict[Path, set[str | int]] = {}
    for path in (*structure.values(), *structure.containers):
        for depth, step in enumerate(path):
            steps.setdefault(path[:depth], set()).add(step)
    with_gaps = {
        path
        for path, found in steps.items()
        if any(type(step) is int for step in found) and found != set(range(len(found)))
    }

    def repaired(path: Path) -> Path:
        return tuple(
            TypedKey(step) if type(step) is int and path[:depth] in with_gaps else step
            for depth, step in enumerate(path)
        )

    whole = Structure({key: repaired(path) for key, path in structure.items()})
    whole.containers = {repaired(path): container for path, container in structure.containers.items()}
    return whole


def refuse_values_in_values(structure: Structure) -> None:
    """Raise UsageError if a value would have to be where a container is, or in another value."""
    values = {tuple(map(str, path)): key for key, path in structure.items()}
    for path, depth in (
        *((path, len(path)) for path in structure.values()),
        *((path, len(path) + 1) for path in structure.containers),
    ):
        steps = tuple(map(str, path))
        above = next((steps[:end] for end in range(1, depth) if steps[:end] in values), None)
        if above is not None:
            raise UsageError(
                f"{values[above]} would be the name of a value and of a container ({flat_key(path)}): rename "
                "one of them",
                key=values[above],
            )
