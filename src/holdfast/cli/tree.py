"""Keys as a tree: which are below which, and how large everything below a node is."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from holdfast._contents.inventory import ObjectEntry, TensorEntry
from holdfast._format.paths import TypedKey
from holdfast.cli.text import printable

__all__ = ["Node", "branches", "entry_nbytes", "make_tree"]

Entry = TensorEntry | ObjectEntry
Order = Literal["size", "name"] | None

_LINES = ("├─ ", "└─ ", "│  ", "   ")
_ASCII = ("|- ", "`- ", "|  ", "   ")


_NO_CHILDREN: dict[Any, "Node"] = {}
"""Those of all nodes that have none: a dict for each of 100,000 leaves takes time. Nobody writes into it."""


class Node:
    """A step on the way to keys. ``entry`` is what is stored there, if anything is."""

    __slots__ = ("children", "count", "entry", "label", "nbytes")

    def __init__(self, label: str) -> None:
        self.label = label
        self.entry: Entry | None = None
        self.children = _NO_CHILDREN
        self.nbytes = 0
        self.count = 0


def entry_nbytes(entry: Entry) -> int:
    """A tensor's elements in bytes; for an object, and for a dtype unknown here, what the file has of it."""
    if isinstance(entry, TensorEntry):
        if entry.nbytes is not None:
            return entry.nbytes
        return sum(chunk.item.length for chunk in entry.chunks if chunk.item)
    return entry.item.length if entry.item else 0


def make_tree(entries: Iterable[Entry], paths: dict[str, tuple[Any, ...]], order: Order) -> Node:
    """The tree of some keys. Where no path is recorded, the dots of the key are its steps."""
    root = Node("")
    for entry in entries:
        nbytes = entry_nbytes(entry)
        node = root
        node.nbytes += nbytes
        node.count += 1
        for step in paths.get(entry.key) or entry.key.split("."):
            name = step if type(step) is str else _name_of(step)
            child = node.children.get(name)
            if child is None:
                child = Node(_label(step))
                if node.children:
                    node.children[name] = child
                else:
                    node.children = {name: child}
            node = child
            node.nbytes += nbytes
            node.count += 1
        node.entry = entry
    if order is not None:
        _sort(root, order)
    return root


def _name_of(step: Any) -> tuple[Any, ...]:
    """A step that is no text: 1 and "1" are different keys, and so are 1 and True."""
    return (type(step), step.value, type(step.value)) if type(step) is TypedKey else (type(step), step)


def _label(step: Any) -> str:
    if type(step) is TypedKey:
        return printable(repr(step.value))
    return printable(step) if isinstance(step, str) else f"[{step}]"


def _sort(root: Node, order: Order) -> None:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if len(node.children) > 1:
            below = sorted(node.children.items(), key=lambda pair: pair[1].label)
            if order == "size":
                below.sort(key=lambda pair: -pair[1].nbytes)
            node.children = dict(below)
        waiting.extend(node.children.values())


def branches(root: Node, *, depth: int | None, with_lines: bool) -> Iterator[tuple[str, Node, bool]]:
    """Every node below the root from top to bottom: its branch as drawn, itself, and whether it is cut."""
    middle, last, through, blank = _LINES if with_lines else _ASCII
    # Paths may be deeper than Python's recursion: a stack of our own.
    stack = [("", iter(root.children.values()), len(root.children))]
    while stack:
        indent, nodes, left = stack.pop()
        for node in nodes:
            left -= 1
            branch = indent + (middle if left else last) + node.label
            if not node.children:
                yield branch, node, False
                continue
            cut = depth is not None and len(stack) + 1 >= depth
            yield branch, node, cut
            if not cut:
                stack.append((indent, nodes, left))
                below = indent + (through if left else blank)
                stack.append((below, iter(node.children.values()), len(node.children)))
                break
