"""Between nested states and flat keys: flattening by torch's rules, and getting every key's type back.

A flat key is the path to a leaf, joined by dots, as torch makes it, so that either side finds the other's
keys. torch turns every key of a dict into a string on the way and forgets what it was; a path here keeps
both (:class:`TypedKey`), and a :class:`Structure` also remembers the containers that hold no leaf.
"""

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from holdfast._contents.nested_state import Container, Path, build_nested, true_key
from holdfast._format.paths import TypedKey, encode_key
from holdfast._plan.interning import pack, unpack
from holdfast._tensors.tensor_parts import TensorParts, why_other
from holdfast.errors import PlanError, UsageError

Slot: TypeAlias = "tuple[Any, Any]"
"""A container and the key in it that a leaf stands under."""


PLAIN_VALUES = frozenset(
    {int, float, complex, bool, str, bytes, bytearray, tuple, set, frozenset, type(None)}
)
"""Classes of values that are leaves, whatever is in them. Asking them whether they are takes microseconds
each, and a list may have millions of them."""


class Structure(dict[str, Path]):
    """The path of each flat key, and what is needed besides to build the nested state again.

    Attributes:
        containers: What the leaves do not tell: the empty containers, and those that are not plain.
    """

    def __init__(self, paths: Mapping[str, Path] | Iterable[tuple[str, Path]] = ()) -> None:
        super().__init__(paths)
        self.containers: dict[Path, Container] = {}

    def __or__(self, other: Any) -> "Structure":  # type: ignore[override]
        """A structure with the entries and containers of both; those of ``other`` win."""
        joined = Structure({**self, **other})
        joined.containers = {**self.containers, **containers_of(other)}
        return joined

    def __reduce__(self) -> Any:
        return _structure_as_received, (pack(dict(self)), self.containers)

    def merge(self, other: Mapping[str, Path]) -> None:
        """Add another rank's paths; for a key that both have, this one's stays."""
        # Ranks that hold shards of the same tensors have the same keys.
        if not other.keys() <= self.keys():
            for key, path in other.items():
                self.setdefault(key, path)
        for where, container in containers_of(other).items():
            self.containers.setdefault(where, container)

    def refuse_other_tensors(self, other: Mapping[str, Path]) -> None:
        """Raise PlanError if another rank's structure has the parts of another tensor at the same place."""
        for where, container in containers_of(other).items():
            known = self.containers.get(where, container)
            if known is container or known.tensor is None or container.tensor is None:
                continue
            ours, theirs = known.tensor, container.tensor
            if ours["dtype"] != theirs["dtype"] or why_other(ours, theirs):
                key = flat_key(where)
                raise PlanError(
                    f"{key}: ranks hold different tensors here: {known.tensor} and {container.tensor}",
                    key=key,
                )


def _structure_as_received(paths: bytes, containers: dict[Path, Container]) -> Structure:
    made = Structure(unpack(paths, dict))
    made.containers = containers
    return made


@contextlib.contextmanager
def refusing_endless() -> Iterator[None]:
    """Make the RecursionError of a walk over a state an error that says what is wrong with the state."""
    try:
        yield
    except RecursionError:
        raise UsageError("the state contains itself, or is nested too deeply to be saved") from None


def flat_key(path: Path) -> str:
    """The flat key of a path."""
    return ".".join(map(str, path))


def paths_of(planner_data: Any) -> dict[str, Path]:
    """The path of each flat key that a checkpoint's planner data records; a planner may have others there."""
    return planner_data if isinstance(planner_data, dict) else {}


def containers_of(planner_data: Any) -> dict[Path, Container]:
    """The containers that a checkpoint's planner data records; none if another planner than ours made it."""
    return planner_data.containers if isinstance(planner_data, Structure) else {}


def container_kinds(paths: Mapping[str, Any]) -> dict[Path, str]:
    """The opened containers of a state: ``dict``, ``list``, or ``tensor`` for the parts of a tensor."""
    kinds: dict[Path, str] = {}
    for path in itertools.chain(paths.values(), containers_of(paths)):
        # A planner that is not ours may have something else here.
        step, above = (path[-1], path[:-1]) if isinstance(path, tuple) and path else (None, ())
        while above and above not in kinds:
            kinds[above] = "list" if type(step) is int else "dict"
            step, above = above[-1], above[:-1]
    for path, container in containers_of(paths).items():
        if path and container.kind != "list":
            kinds[path] = "dict" if container.tensor is None else "tensor"
    return kinds


def merge_structures(all_ranks: list[Any], stored: Collection[str]) -> Structure:
    """The structure of a state of which each rank has a part.

    Args:
        all_ranks: The planner data of all ranks' plans.
        stored: The flat keys that they store together.

    Raises:
        PlanError: One rank has a value or a list where another has a dict, or the parts of another tensor.
    """
    if len(all_ranks) == 1 and isinstance(all_ranks[0], Structure):
        return all_ranks[0]
    merged = Structure()
    for planner_data in all_ranks:
        merged.refuse_other_tensors(planner_data)
        merged.merge({} if planner_data is None else planner_data)
    first = all_ranks[0] if all_ranks else None
    # Ranks with the same keys have the same containers.
    if len(merged) > len(first or ()) or len(merged.containers) > len(containers_of(first)):
        _refuse_other_kinds(merged, all_ranks, stored)
    return merged


def _refuse_other_kinds(merged: Structure, all_ranks: list[Any], stored: Collection[str]) -> None:
    kinds: dict[Path, str] = {}
    paths: list[Any] = [*merged.values()]
    places: list[tuple[Path, str]] = [(path, "value") for path in paths if isinstance(path, tuple)]
    places += [(path, "dict") for path, told in merged.containers.items() if told.kind != "list"]
    for leaf, what in places:
        path, kind = leaf, what
        while path and path not in kinds:
            kinds[path] = kind
            path, kind = path[:-1], "list" if type(path[-1]) is int else "dict"
        if path and kinds[path] != kind:
            key = flat_key(path)
            if "value" in (kinds[path], kind) and key not in stored:
                # A rank outside of a mesh has a tensor without elements where others have the parts of one.
                if kind != "value":
                    kinds[path] = kind
                continue
            held: dict[str, int] = {}
            for rank, of_rank in enumerate(all_ranks):
                known = of_rank or {}
                here = container_kinds(known).get(path) or ("value" if path in known.values() else "")
                held.setdefault(here, rank)
            found = " and ".join(f"rank {rank} has a {here}" for here, rank in held.items() if here)
            raise PlanError(
                f"{key}: {found} here, and these cannot be kept for each rank. Save PerRank(value) on every "
                "rank, or rename one of them.",
                key=key,
            )


def flatten(
    state: Mapping[Any, Any],
    is_tensor: Callable[[Any], bool],
    *,
    open_every_dict: bool = True,
    is_saved: bool = False,
) -> tuple[dict[str, Any], Structure, dict[str, Slot]]:
    """Turn a nested state into its leaves by flat key.

    Dicts are opened; so is a list that holds, at any depth of lists, a dict or a tensor. Everything else
    is a leaf: tensors, tuples, plain lists, other values.

    Args:
        state: The nested state; it is not changed.
        is_tensor: Whether a value is a tensor.
        open_every_dict: False for the rule of torch before 2.4: a dict that holds no tensor at any depth
            is a leaf.
        is_saved: Whether every key must be of a type that a checkpoint can keep.

    Returns:
        The leaves, the structure, and for each leaf the slot that it stands in.

    Raises:
        UsageError: Two leaves have the same flat key, or the state contains itself.
        PlanError: A key cannot be kept.
    """
    walk = _Flattening(is_tensor, open_every_dict=open_every_dict, is_saved=is_saved)
    with refusing_endless():
        walk.visit_dict((), state)
    return walk.leaves, walk.structure, walk.slots


class _Flattening:
    def __init__(self, is_tensor: Callable[[Any], bool], *, open_every_dict: bool, is_saved: bool) -> None:
        self.is_tensor = is_tensor
        self.is_saved = is_saved
        self.open_every_dict = open_every_dict
        self.leaves: dict[str, Any] = {}
        self.structure = Structure()
        self.slots: dict[str, Slot] = {}
        # Whether a class is one of containers. Asking Mapping costs as much as all else for a leaf.
        self.is_container: dict[type, bool] = {}

    def visit(self, path: Path, value: Any, slot: Slot) -> None:
        kind = type(value)
        is_container = self.is_container.get(kind)
        if is_container is None:
            is_container = self.is_container[kind] = issubclass(kind, Mapping | list)
        if is_container and self.is_opened(value):
            if isinstance(value, list):
                for number, entry in enumerate(value):
                    self.visit((*path, number), entry, (value, number))
            else:
                self.visit_dict(path, value)
        else:
            key = ".".join(map(str, path)) if len(path) > 1 else str(path[0])
            if not key.isascii():
                check_text(key)
            if key in self.leaves:
                raise UsageError(
                    f"two values would both be called {key!r}: "
                    f"{_show(self.structure[key])} and {_show(path)}. Rename one of them.",
                    key=key,
                )
            self.leaves[key] = value
            self.structure[key] = path
            self.slots[key] = slot

    def visit_dict(self, path: Path, value: Mapping[Any, Any]) -> None:
        if path and not value:
            check_text(flat_key(path))  # no leaf below has this name
        if isinstance(value, TensorParts):
            self.structure.containers[path] = Container("dict", len(self.leaves), value.about)
        elif isinstance(value, OrderedDict):
            self.structure.containers[path] = Container("OrderedDict", len(self.leaves))
        elif not value:
            self.structure.containers[path] = Container("dict", len(self.leaves))
        if len({str(key) for key in value}) < len(value):
            self.refuse_alike(path, value)
        for key, entry in value.items():
            step = key if type(key) is str else self.typed_key(path, key)
            self.visit((*path, step), entry, (value, key))

    def typed_key(self, path: Path, key: Any) -> TypedKey:
        """The step for a key that is not a string."""
        step = TypedKey(key)
        if self.is_saved:
            try:
                encode_key(key)
            except PlanError as error:
                flat = flat_key((*path, step))
                raise PlanError(f"{flat}: {error}", key=flat) from None
        return step

    def refuse_alike(self, path: Path, value: Mapping[Any, Any]) -> None:
        """Raise for two keys of a dict that are the same as text, such as 1 and '1'."""
        seen: dict[str, Any] = {}
        for key in value:
            name = str(key)
            if name in seen:
                flat = ".".join([*map(str, path), name])
                raise UsageError(
                    f"two values would both be called {flat!r}: {_show(path)}[{seen[name]!r}] and "
                    f"{_show(path)}[{key!r}]. Rename one of them.",
                    key=flat,
                )
            seen[name] = key

    def is_opened(self, value: Any) -> bool:
        """Whether a container is opened: if it is a dict, or holds a tensor or an opened container."""
        if isinstance(value, Mapping):
            return self.open_every_dict or any(map(self.is_opened, value.values()))
        if isinstance(value, list):
            return any(type(entry) not in PLAIN_VALUES and self.is_opened(entry) for entry in value)
        return self.is_tensor(value)


def check_text(key: str) -> None:
    """Raise UsageError if a name cannot be written down."""
    try:
        key.encode()
    except UnicodeEncodeError:
        raise UsageError(f"the name {key!r} is not valid text: it has half of a character", key=key) from None


def _show(path: Path) -> str:
    return "".join(f"[{true_key(step)!r}]" for step in path)


def unflatten(
    leaves: Mapping[str, Any],
    paths: Mapping[str, Path],
    containers: Mapping[Path, Container] | None = None,
) -> dict[Any, Any]:
    """Build a nested state from leaves, as ``build_nested`` does, with parts of tensors as TensorParts."""
    return build_nested(leaves, paths, containers, hold_parts=lambda about: TensorParts(about=about))
