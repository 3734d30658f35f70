"""Between nested states and flat keys: flattening by torch's rules, and getting every key's type back.

A flat key is the path to a leaf, joined by dots, as torch makes it, so that either side finds the other's
keys. torch turns every key of a dict into a string on the way and forgets what it was; a path here keeps
both (:class:`TypedKey`), and a :class:`Structure` also remembers the containers that hold no leaf.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from holdfast._format.typed_key import TypedKey
from holdfast.errors import UsageError

__all__ = ["Path", "Slot", "Structure", "flatten", "true_key", "unflatten"]

Path: TypeAlias = "tuple[str | int, ...]"
"""How to reach a leaf: strings are keys of dicts, ints are positions in lists."""

Slot: TypeAlias = "tuple[Any, Any]"
"""A container and the key in it that a leaf stands under."""


class Structure(dict[str, Path]):
    """The path of each flat key, and what is needed besides to build the nested state again.

    Attributes:
        containers: The kind (``dict``, ``OrderedDict``, ``list``) of each container that its leaves do
            not tell: the empty ones, and those that are not plain.
    """

    def __init__(self, paths: Mapping[str, Path] | Iterable[tuple[str, Path]] = ()) -> None:
        super().__init__(paths)
        self.containers: dict[Path, str] = {}

    def merge(self, other: Mapping[str, Path]) -> None:
        """Add another rank's paths; for a key that both have, this one's stays."""
        for key, path in other.items():
            self.setdefault(key, path)
        for where, kind in getattr(other, "containers", {}).items():
            self.containers.setdefault(where, kind)


def flatten(
    state: Mapping[Any, Any],
    is_tensor: Callable[[Any], bool],
    *,
    open_every_dict: bool = True,
) -> tuple[dict[str, Any], Structure, dict[str, Slot]]:
    """Turn a nested state into its leaves by flat key.

    Dicts are opened; so is a list that holds, at any depth of lists, a dict or a tensor. Everything else
    is a leaf: tensors, tuples, plain lists, other values.

    Args:
        state: The nested state; it is not changed.
        is_tensor: Whether a value is a tensor.
        open_every_dict: False for the rule of torch before 2.4: a dict that holds no tensor at any depth
            is a leaf.

    Returns:
        The leaves, the structure, and for each leaf the slot that it stands in.

    Raises:
        UsageError: Two leaves have the same flat key, or the state contains itself.
    """
    walk = _Walk(is_tensor, open_every_dict=open_every_dict)
    try:
        walk.visit_dict((), state)
    except RecursionError:
        raise UsageError("the state contains itself, or is nested too deeply to be saved") from None
    return walk.leaves, walk.structure, walk.slots


class _Walk:
    def __init__(self, is_tensor: Callable[[Any], bool], *, open_every_dict: bool) -> None:
        self.is_tensor = is_tensor
        self.open_every_dict = open_every_dict
        self.leaves: dict[str, Any] = {}
        self.structure = Structure()
        self.slots: dict[str, Slot] = {}

    def visit(self, path: Path, value: Any, slot: Slot) -> None:
        if isinstance(value, Mapping) and self.opens_dict(value):
            self.visit_dict(path, value)
        elif isinstance(value, list) and self.opens_list(value):
            for number, entry in enumerate(value):
                self.visit((*path, number), entry, (value, number))
        else:
            key = ".".join(map(str, path)) if len(path) > 1 else str(path[0])
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
        if isinstance(value, OrderedDict):
            self.structure.containers[path] = "OrderedDict"
        elif not value:
            self.structure.containers[path] = "dict"
        for key, entry in value.items():
            step = key if type(key) is str else TypedKey(key)
            self.visit((*path, step), entry, (value, key))

    def opens_dict(self, value: Mapping[Any, Any]) -> bool:
        return self.open_every_dict or any(self.holds_tensor(entry) for entry in value.values())

    def opens_list(self, value: list[Any]) -> bool:
        return any(
            self.is_tensor(entry)
            or (isinstance(entry, Mapping) and self.opens_dict(entry))
            or (isinstance(entry, list) and self.opens_list(entry))
            for entry in value
        )

    def holds_tensor(self, value: Any) -> bool:
        if isinstance(value, Mapping):
            return any(self.holds_tensor(entry) for entry in value.values())
        if isinstance(value, list):
            return any(self.holds_tensor(entry) for entry in value)
        return self.is_tensor(value)


def _show(path: Path) -> str:
    return "".join(f"[{true_key(step)!r}]" for step in path)


def true_key(step: str | int) -> Any:
    """What a step of a path really is as a key or a position."""
    return step.value if isinstance(step, TypedKey) else step


def unflatten(
    leaves: Mapping[str, Any], paths: Mapping[str, Path], containers: Mapping[Path, str] | None = None
) -> dict[Any, Any]:
    """Build a nested state from leaves; a key without a path stays as it is.

    Positions of a list that no leaf fills hold None.
    """
    containers = containers or {}
    root: Any = OrderedDict() if containers.get(()) == "OrderedDict" else {}
    made: dict[Path, Any] = {(): root}

    def container(path: Path, next_step: str | int | None) -> Any:
        if path in made:
            return made[path]
        kind = containers.get(path)
        if kind is None:
            kind = "list" if isinstance(next_step, int) else "dict"
        value: Any = [] if kind == "list" else OrderedDict() if kind == "OrderedDict" else {}
        made[path] = value
        _put(container(path[:-1], path[-1]), path[-1], value)
        return value

    # Containers first where they are known, so that an empty one keeps its place among its siblings only
    # as far as the leaves' order tells.
    for key, value in leaves.items():
        path = paths.get(key, (key,))
        _put(container(path[:-1], path[-1]), path[-1], value)
    for path in containers:
        if path:
            container(path, None)
    return root  # type: ignore[no-any-return]


def _put(container: Any, step: str | int, value: Any) -> None:
    key = true_key(step)
    if isinstance(container, list):
        container.extend([None] * (key + 1 - len(container)))
    container[key] = value
