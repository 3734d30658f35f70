"""Opens the doors: replaces torch's functions by ones that lead to ours, and puts them back."""

import contextlib
import functools
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from holdfast._install.door_table import DOORS, PACKAGE
from holdfast._install.install_options import InstallOptions, read_options

if TYPE_CHECKING:
    from holdfast._install.calls import Calls


Function = Callable[..., Any]


class Doors:
    """The doors of this process.

    Attributes:
        are_open: Whether torch's functions lead to ours.
        options: The options of ``install``; None until they are needed.
        originals: torch's function for each door.
        left_alone: The names that stay torch's, each with the reason.
    """

    def __init__(self) -> None:
        self.are_open = False
        self.options: InstallOptions | None = None
        self.originals: dict[Function, Function] = {}
        self.left_alone: dict[str, str] = {}
        self._in_torch = threading.local()

    def open(self, options: InstallOptions) -> None:
        """Open the doors of all modules that are imported. A second call changes only the options."""
        self.options = options
        self.are_open = True
        vars(self).pop("calls", None)
        _wait_for_import(PACKAGE)
        for name in DOORS:
            _wait_for_import(f"{PACKAGE}.{name}")
            module = sys.modules.get(f"{PACKAGE}.{name}")
            if module is not None:
                self._make_doors(module)
        _rebind({original: door for door, original in self.originals.copy().items()})

    def open_module(self, module: ModuleType) -> None:
        """Open the doors of a module that was just imported."""
        if self.options is None:
            self.options = read_options({})
        self.are_open = True
        self._make_doors(module)
        for name, value in [*vars(module).items()]:
            for door, original in self.originals.copy().items():
                if value is original:
                    vars(module)[name] = door

    def close(self) -> None:
        """Put torch's functions back, everywhere."""
        self.are_open = False
        self.options = None
        _rebind(self.originals)
        self.originals.clear()
        self.left_alone.clear()
        vars(self).pop("calls", None)

    def places(self) -> list[str]:
        """Where modules have a door."""
        return _places_of(self.originals)

    def strangers(self) -> dict[str, str]:
        """The classes that were used as they are, each with the reason."""
        made: Calls | None = vars(self).get("calls")
        return {} if made is None else dict(made.translator.strangers)

    @functools.cached_property
    def calls(self) -> "Calls":
        """How our functions are called. Made at the first call: it needs torch as a whole."""
        from holdfast._install.calls import Calls  # noqa: PLC0415

        return Calls(self.options or InstallOptions())

    def _make_doors(self, module: ModuleType) -> None:
        name = module.__name__.rpartition(".")[2]
        ours = f"holdfast.{name}"
        has_ours = importlib.util.find_spec(ours) is not None
        for function in DOORS[name]:
            original = vars(module).get(function)
            if original is None or original in self.originals:
                continue  # this version of torch does not have it; or it is done
            name_in_torch, patch = f"{module.__name__}.{function}", _patch(original)
            if not has_ours:
                self.left_alone[name_in_torch] = "holdfast has no such function"
            elif patch:
                self.left_alone[name_in_torch] = f"{patch} has replaced it"
            elif original not in self.originals.values():
                self.originals[self._door(original, ours, function)] = original

    def _door(self, original: Function, module: str, name: str) -> Function:
        @functools.wraps(original)
        def door(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001 - there is no other way
            # Where our own code asks torch, it means torch.
            if not self.are_open or getattr(self._in_torch, "is_on", False) or _is_ours(caller):
                return self._call_torch(original, args, kwargs)
            function = getattr(importlib.import_module(module), name)
            return self.calls.call(function, name, args, kwargs)

        return door

    def _call_torch(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call torch's function so that what it calls is torch's as well."""
        before = getattr(self._in_torch, "is_on", False)
        self._in_torch.is_on = True
        try:
            return original(*args, **kwargs)
        finally:
            self._in_torch.is_on = before


def _rebind(replacements: Mapping[Function, Function]) -> None:
    """Put the second function of each pair wherever a module has the first one.

    Only names of modules are found: not attributes of classes, default arguments or closures.
    """
    wanted = {id(old): new for old, new in replacements.items()}
    for names, name, value in _names_of_modules():
        new = wanted.get(id(value))
        if new is not None:
            names[name] = new


def _places_of(functions: Mapping[Function, Any]) -> list[str]:
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


def _wait_for_import(name: str) -> None:
    """If another thread is importing a module, wait until it has its functions."""
    module = sys.modules.get(name)
    if module is not None and getattr(module.__spec__, "_initializing", False):
        with contextlib.suppress(ImportError):  # that thread raises it
            importlib.import_module(name)


_DECORATORS = {"torch", "typing_extensions", "warnings", "contextlib", "functools"}
"""Packages whose code stands where torch's functions are: its own, and those that it decorates them with."""


def _patch(function: Function) -> str:
    """The module that has put a function of its own in the place of torch's; empty if none has."""
    # Not by its __module__, which decorators copy.
    home = str(getattr(function, "__globals__", {}).get("__name__", "an object"))
    return "" if home.partition(".")[0] in _DECORATORS else home


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "holdfast"


doors = Doors()
"""The doors of this process."""
