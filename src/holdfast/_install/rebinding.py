"""Replaces functions in every module that has them under any name, and finds where they are."""

import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

Function = Callable[..., Any]


def rebind(replacements: Mapping[Function, Function]) -> None:
    """Put the second function of each pair wherever a module has the first one.

    Only names of modules are found: not attributes of classes, default arguments or closures.
    """
    wanted = {id(old): new for old, new in replacements.items()}
    for names, name, value in _names_of_modules():
        new = wanted.get(id(value))
        if new is not None:
            names[name] = new


def places_of(functions: Mapping[Function, Any]) -> list[str]:
    """Where modules have one of the functions, such as ``"accelerate.utils.fsdp_utils.save"``, in order."""
    wanted = {id(function) for function in functions}
    found = {
        f"{names.get('__name__', '?')}.{name}"
        for names, name, value in _names_of_modules()
        if id(value) in wanted
    }
    return sorted(found)


def _names_of_modules() -> Iterator[tuple[dict[str, Any], str, Any]]:
    # Other threads may import modules meanwhile: the lists are copies.
    for module in [*sys.modules.values()]:
        # Some programs put other objects there. Asking those for attributes may run their code.
        if isinstance(module, ModuleType):
            names = vars(module)
            for name, value in [*names.items()]:
                yield names, name, value
