"""Owns which values of a source a conversion takes, under which names, and with which dtypes."""

import fnmatch
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast._contents.nested_state import Container, Path
from holdfast._conversion.sources import Source
from holdfast._geometry import volume
from holdfast._plan.dtype_fit import cast_floats
from holdfast._plan.flatten import Structure, containers_of
from holdfast._plan.key_renaming import Rename, renaming
from holdfast.errors import MissingKeyError, PlanError, UsageError
from holdfast.per_rank import KEPT

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """One value that is taken.

    Attributes:
        key: Its key in the source.
        name: Its key in the target.
        dtype: If it is a tensor, the dtype that it gets.
        shape: If it is a tensor, its shape.
        requires_grad: Whether it is a tensor that gets a gradient.
    """

    key: str
    name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...] = ()
    requires_grad: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes of its elements in the target; 0 for what is not a tensor."""
        return 0 if self.dtype is None else volume(self.shape) * self.dtype.itemsize


@dataclass
class Selection:
    """What is taken of a source.

    Attributes:
        entries: The values, in the order of the source, by their keys in the target.
        structure: How they are nested in the target.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    structure: Structure = field(default_factory=Structure)

    def tensors(self) -> Iterator[Entry]:
        """The tensors."""
        return (entry for entry in self.entries.values() if entry.dtype is not None)

    def objects(self) -> Iterator[Entry]:
        """The other values."""
        return (entry for entry in self.entries.values() if entry.dtype is None)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors in the target."""
        return sum(entry.nbytes for entry in self.entries.values())


def select(
    source: Source,
    *,
    keys: Sequence[str] | None,
    rename: Rename | None,
    dtype: torch.dtype | None,
    with_kept_values: bool,
) -> Selection:
    """What is taken of a source.

    Args:
        source: The source.
        keys: Patterns of keys; None for all.
        rename: New names.
        dtype: What floating-point tensors are cast to.
        with_kept_values: Whether values that were kept for each rank are taken, too.

    Raises:
        MissingKeyError: A pattern matches no key.
        UsageError: Two values get the same name.
    """
    there = list(source.metadata.state_dict_metadata)
    wanted = set(there) if keys is None else _matching(there, keys)
    kept = [key for key in there if key.startswith(KEPT) and not with_kept_values and key in wanted]
    if kept:
        logger.warning(
            "%s: values that were kept for each rank are left out, as the target has one of each: %s%s",
            *(source.url, ", ".join(kept[:5]), " ..." if len(kept) > 5 else ""),
        )
    wanted.difference_update(kept)
    taken = [key for key in there if key in wanted]
    naming = str if rename is None else renaming(rename, with_below=True)
    chosen = Selection()
    paths = source.metadata.planner_data if isinstance(source.metadata.planner_data, dict) else {}
    old_paths: dict[str, Path] = {}
    for key in taken:
        name, path = naming(key), paths.get(key, (key,))
        if name in chosen.entries:
            other = chosen.entries[name].key
            raise UsageError(f"{other} and {key} would both be called {name!r}: rename one of them", key=key)
        chosen.entries[name] = _entry(source, key, name, dtype)
        old_paths[name] = path
        chosen.structure[name] = path if name == key else _path_of(name, path)
    chosen.structure.containers = _containers(containers_of(paths), old_paths, chosen, there, keys, rename)
    return chosen


def _matching(there: Sequence[str], patterns: Sequence[str]) -> set[str]:
    found = set()
    for pattern in patterns:
        below = f"{pattern}.*"
        matches = [
            key for key in there if fnmatch.fnmatchcase(key, pattern) or fnmatch.fnmatchcase(key, below)
        ]
        if not matches:
            near = ", ".join(there[:5]) + (", ..." if len(there) > 5 else "")
            raise MissingKeyError(f"no key matches {pattern!r}; there are {near}", key=pattern)
        found.update(matches)
    return found


def _path_of(name: str, path: Path) -> Path:
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


def _containers(
    containers: Mapping[Path, Container],
    old_paths: Mapping[str, Path],
    chosen: Selection,
    there: Sequence[str],
    keys: Sequence[str] | None,
    rename: Rename | None,
) -> dict[Path, Container]:
    """The containers of what is taken, at their new places."""
    if not containers:
        return {}
    places: dict[Path, Path] = {(): ()}
    for name, old in old_paths.items():
        new = chosen.structure[name]
        for below in range(1, min(len(old), len(new))):
            if old[-below:] == new[-below:]:
                places.setdefault(old[:-below], new[:-below])
    if keys is None and rename is None:
        places.update({path: path for path in containers})
    taken = {entry.key for entry in chosen.entries.values()}
    numbers = [0]
    for key in there:
        numbers.append(numbers[-1] + (key in taken))
    return {
        places[path]: container._replace(position=numbers[min(container.position, len(there))])
        for path, container in containers.items()
        if path in places
    }


def _entry(source: Source, key: str, name: str, dtype: torch.dtype | None) -> Entry:
    tensor = source.tensor(key)
    if tensor is None:
        return Entry(key, name, None)
    properties = tensor.properties
    stored = cast_floats(properties.dtype, dtype)
    return Entry(key, name, stored, tuple(tensor.size), properties.requires_grad)


def refuse_objects(selection: Selection, to: str) -> None:
    """Raise PlanError if a value is not a tensor, or is a part of one: for formats that hold tensors only."""
    values = [entry.name for entry in selection.objects()]
    if values:
        more = f" and {len(values) - 1} more" if len(values) > 1 else ""
        raise PlanError(
            f"{values[0]}{more}: {to} holds tensors only, and this is another value. Select the tensors: "
            "keys=['model.*'], or --keys 'model.*'.",
            key=values[0],
        )


def refuse_subclasses(selection: Selection, to: str) -> None:
    """Raise PlanError if a tensor is of a class of its own, of which the target could have only the parts."""
    for path, container in selection.structure.containers.items():
        if container.tensor is not None:
            key = ".".join(map(str, path))
            module, name = container.tensor["class"]
            raise PlanError(
                f"{key}: is a {module}.{name}, and {to} cannot hold one without code. Leave it out with "
                "keys=, or load it and save it as a plain tensor.",
                key=key,
            )
