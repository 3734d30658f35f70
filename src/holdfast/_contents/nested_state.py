"""Flat keys back into the nested state that they were flattened from."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from holdfast._format.paths import TypedKey

Path: TypeAlias = "tuple[str | int, ...]"
"""How to reach a leaf: strings are keys of dicts, ints are positions in lists."""


class Container(NamedTuple):
    """A container that its leaves do not tell.

    Attributes:
        kind: ``dict``, ``OrderedDict`` or ``list``.
        position: How many leaves of the whole state come before it, so that an empty one finds its place.
        tensor: If it holds the parts of a tensor, what else is known of that tensor; see ``TensorParts``.
    """

    kind: str
    position: int
    tensor: dict[str, Any] | None = None


def true_key(step: str | int) -> Any:
    """The key of the dict, or the position in the list, that a step of a path stands for."""
    return step.value if isinstance(step, TypedKey) else step


def build_nested(
    leaves: Mapping[str, Any],
    paths: Mapping[str, Path],
    containers: Mapping[Path, Container] | None = None,
    *,
    hold_parts: Callable[[dict[str, Any]], dict[str, Any]],
) -> dict[Any, Any]:
    """Build a nested state from leaves; a key without a path stays as it is.

    Positions of a list that no leaf fills hold None.

    Args:
        leaves: The values by their flat keys.
        paths: The way to each key.
        containers: What the paths do not tell.
        hold_parts: Makes the empty dict for the parts of a tensor, of what is known of that tensor.
    """
    known = {} if containers is None else dict(containers)
    root: Any = OrderedDict() if () in known and known[()].kind == "OrderedDict" else {}
    made: dict[Path, Any] = {(): root}

    def container(path: Path, next_step: str | int | None) -> Any:
        if path in made:
            return made[path]
        told = known[path].kind if path in known else None
        kind = told or ("list" if isinstance(next_step, int) else "dict")
        value: Any = [] if kind == "list" else OrderedDict() if kind == "OrderedDict" else {}
        if path in known and (about := known[path].tensor) is not None:
            value = hold_parts(about)
        made[path] = value
        put_at(container(path[:-1], path[-1]), path[-1], value)
        return value

    # The next one is the last; empty neighbours have one position, and keep their order.
    waiting = sorted(known.items(), key=lambda entry: entry[1].position)[::-1]
    order = {key: number for number, key in enumerate(paths)}
    for key, value in leaves.items():
        while waiting and waiting[-1][1].position <= order.get(key, 0):
            container(waiting.pop()[0], None)
        path = paths.get(key, (key,))
        put_at(container(path[:-1], path[-1]), path[-1], value)
    for path, _ in reversed(waiting):
        container(path, None)
    return root  # type: ignore[no-any-return]


def put_at(container: Any, step: str | int, value: Any) -> None:
    """Put a value where a step of a path leads; a list grows to the position, with None in between."""
    key = true_key(step)
    if isinstance(container, list):
        container.extend([None] * (key + 1 - len(container)))
    container[key] = value
