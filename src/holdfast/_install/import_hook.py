"""Waits until modules of torch's checkpoint package are imported, and then opens their doors.

It imports nothing that costs time: every Python process with ``HOLDFAST_INSTALL=1`` runs ``watch`` at its
start, most of them without torch.
"""

import sys

from holdfast._install.door_table import DOOR_MODULES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class _Finder:
    """Finds modules as all others do, and has their doors opened when they have been executed."""

    @classmethod
    def find_spec(cls, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        """The specification of a module with doors, as another finder has it; None for any other module."""
        if name not in DOOR_MODULES:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if finder is cls or find is None else find(name, path, target)
            if spec is not None:
                _open_doors_after(spec)
                return spec
        return None


def _open_doors_after(spec: "ModuleSpec") -> None:
    """Have the doors of a module opened when its loader has executed it."""
    loader: Any = spec.loader

    def execute(module: "ModuleType") -> None:
        # The loader stays with the module. It must be as it was.
        del loader.exec_module
        loader.exec_module(module)
        if is_watching():
            from holdfast._install.doors import doors  # noqa: PLC0415 - torch is being imported: time has come

            doors.open_module(module)

    loader.exec_module = execute


def watch() -> None:
    """Open doors when their modules are imported. A second call changes nothing."""
    if not is_watching():
        sys.meta_path.insert(0, _Finder)


def is_watching() -> bool:
    """Whether doors will be opened when their modules are imported."""
    return _Finder in sys.meta_path


def unwatch() -> None:
    """Leave modules that are imported from now on as they are."""
    if is_watching():
        sys.meta_path.remove(_Finder)
