"""Finds names that torch's modules have from each other: programs import them from any of these modules."""

import importlib
from collections.abc import Callable
from typing import Any


def names_of(module: str, *homes: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module: it finds a name where torch's module of the same name has it from.

    Args:
        module: The module that gets it.
        homes: The modules to look into, in order: ours by the names that torch has for them in its package,
            others of torch by their full names.
    """

    def find(name: str) -> Any:
        if not name.startswith("__"):  # those belong to each module itself
            for home in homes:
                place = home if home.startswith("torch.") else f"holdfast.{home}"
                names = vars(importlib.import_module(place))
                if name in names:
                    return names[name]
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find
