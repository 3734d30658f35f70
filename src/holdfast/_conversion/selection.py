"""Owns which values of a source a conversion takes, under which names, and with which dtypes."""

import fnmatch
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from holdfast._contents.nested_state import Path
from holdfast._conversion.nesting import (
    move_with_neighbours,
    moved_containers,
    new_path,
    refuse_values_in_values,
    without_gaps,
)
from holdfast._conversion.sources import Source
from holdfast._geometry import Box, volume
from holdfast._human_units import some_of
from holdfast._plan.dtype_fit import cast_floats
from holdfast._plan.flatten import Structure, check_text, containers_of, flat_key, paths_of
from holdfast._plan.kept_values import refuse_reserved
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
    def box(self) -> Box:
        """The whole tensor as a box."""
        return Box((0,) * len(self.shape), self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of its elements in the target; 0 for what is not a tensor."""
        return 0 if self.dtype is None else volume(self.shape) * self.dtype.itemsize


@dataclass
class Selection:
    """The values that a conversion takes from a source.

    Attributes:
        entries: The values, in the order of the source, by their keys in the target.
        structure: How they are nested in the target.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    structure: Structure = field(default_factory=Structure)

    def tensors(self) -> Iterator[Entry]:
        """The entries that are tensors."""
        return (entry for entry in self.entries.values() if entry.dtype is not None)

    def objects(self) -> Iterator[Entry]:
        """The entries that are not tensors."""
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
    """Choose the values that a conversion takes from a source.

    Args:
        source: The source.
        keys: Patterns of keys; None for all.
        rename: New names.
        dtype: What floating-point tensors are cast to.
        with_kept_values: Whether values that were kept for each rank are taken, too.

    Raises:
        MissingKeyError: A pattern matches no key, or there is none that gets a new name.
        UsageError: Two values get the same name.
    """
    there = list(source.metadata.state_dict_metadata)
    wanted = set(there) if keys is None else _matching(there, keys)
    kept = _kept_values(source, wanted)
    if not with_kept_values:
        wanted -= kept
        _warn_of_left_out(source, kept)
    containers = containers_of(source.metadata.planner_data)
    if isinstance(rename, Mapping):
        _refuse_idle(rename, [*there, *map(flat_key, containers)])
    naming = str if rename is None else renaming(rename, with_below=True)
    chosen, paths = Selection(), paths_of(source.metadata.planner_data)
    moved: dict[Path, Path] = {}
    for key in filter(wanted.__contains__, there):
        name, path = naming(key), paths.get(key, (key,))
        if name in chosen.entries:
            other = chosen.entries[name].key
            raise UsageError(f"{other} and {key} would both be called {name!r}: rename one of them", key=key)
        check_text(name)
        if with_kept_values and key not in kept:
            refuse_reserved([name])
        chosen.entries[name] = _entry(source, key, name, dtype)
        moved[path] = chosen.structure[name] = path if name == key else new_path(name, path)
    # How many taken values come before each position of the source.
    counts = [*accumulate((key in wanted for key in there), initial=0)]
    places = moved_containers(moved)
    for path, container in containers.items():
        place = places[path] if path in places else _place_of_empty(path, keys, rename, places)
        if place is not None:
            position = counts[min(container.position, len(there))]
            chosen.structure.containers[place] = container._replace(position=position)
    if keys is not None or rename is not None:
        chosen.structure = without_gaps(chosen.structure)
        refuse_values_in_values(chosen.structure)
    return chosen


def _kept_values(source: Source, wanted: Iterable[str]) -> set[str]:
    """The keys of values that were kept for each rank. Other formats may have any names, and keep none."""
    return {key for key in wanted if key.startswith(KEPT)} if source.format == "holdfast" else set()


def _warn_of_left_out(source: Source, kept: Collection[str]) -> None:
    if kept:
        logger.warning(
            "%s: values that were kept for each rank are left out, as the target has one of each: %s",
            *(source.url, some_of(sorted(kept), 5)),
        )


def _place_of_empty(
    path: Path, keys: Sequence[str] | None, rename: Rename | None, places: Mapping[Path, Path]
) -> "Path | None":
    """Where a container goes that no taken value is in; None if it is not taken."""
    key = flat_key(path)
    if keys is not None and not any(_matches(key, pattern) for pattern in keys):
        return None
    if not isinstance(rename, Mapping):  # a function of the caller's knows keys only
        return move_with_neighbours(path, places)
    return new_path(renaming(rename, with_below=True)(key), path) if rename.get(key) != "" else None


def _refuse_idle(rename: Mapping[str, str], there: Collection[str]) -> None:
    """Raise if there is nothing that gets one of the new names: it is misspelt."""
    for old in rename:
        if not any(key == old or key.startswith(f"{old}.") for key in there):
            raise MissingKeyError(
                f"rename, or --rename: no key is {old!r} or below it; there are {some_of(there, 5)}", key=old
            )


def _matching(there: Sequence[str], patterns: Sequence[str]) -> set[str]:
    if not patterns:
        raise UsageError("keys is empty: pass patterns of the keys to take, or None for all", found=patterns)
    found = set()
    for pattern in patterns:
        matches = [key for key in there if _matches(key, pattern)]
        if not matches:
            near = ", ".join(there[:5]) + (", ..." if len(there) > 5 else "")
            raise MissingKeyError(f"no key matches {pattern!r}; there are {near}", key=pattern)
        found.update(matches)
    return found


def _matches(key: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(key, pattern) or fnmatch.fnmatchcase(key, f"{pattern}.*")


def _entry(source: Source, key: str, name: str, dtype: torch.dtype | None) -> Entry:
    tensor = source.tensor(key)
    if tensor is None:
        return Entry(key, name, None)
    properties = tensor.properties
    if str(properties.dtype).startswith(("torch.qint", "torch.quint")):
        raise PlanError(
            f"{key}: is a quantised tensor that torch has saved as a plain one: its scales are not known. "
            "Leave it out with keys=.",
            key=key,
        )
    stored = cast_floats(properties.dtype, dtype)
    return Entry(key, name, stored, tuple(tensor.size), properties.requires_grad)


def refuse_objects(selection: Selection, to: str) -> None:
    """Raise PlanError if a value is not a tensor, or is a part of one: for formats that hold tensors only."""
    values = [entry.name for entry in selection.objects()]
    if values:
        more = f" and {len(values) - 1} more" if len(values) > 1 else ""
        raise PlanError(
            f"{values[0]}{more}: {to} holds tensors only, and this is another value. Select the tensors, "
            "such as with keys=['model.*'] or --keys 'model.*'.",
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
