"""Our records as torch's, and torch's as ours.

torch's checkpoint package is never imported from here. Whoever hands us one of its objects has imported it,
and only then its classes are looked up.
"""

import dataclasses
import enum
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar, cast

from holdfast import metadata as our_metadata_module
from holdfast import planner as our_planner_module
from holdfast import storage as our_storage_module
from holdfast._deferred import DeferredDict, DeferredList
from holdfast._format.paths import TypedKey

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE = "torch.distributed.checkpoint"
_OURS: dict[str, ModuleType] = {
    "metadata": our_metadata_module,
    "planner": our_planner_module,
    "storage": our_storage_module,
}


def _torch_class(module: str, name: str) -> type | None:
    loaded = sys.modules.get(f"{_PACKAGE}.{module}")
    return None if loaded is None else vars(loaded).get(name)


@functools.cache
def _tables(_: bool) -> tuple[dict[type, type], dict[type, type]]:
    """Our class for each of torch's, and torch's for each of ours."""
    ours: dict[type, type] = {}
    for module, home in _OURS.items():
        for name, mine in vars(home).items():
            theirs = _torch_class(module, name)
            if theirs is not None and _is_record(mine, home):
                ours[theirs] = mine
    return ours, {mine: theirs for theirs, mine in ours.items()}


def _is_record(value: Any, home: ModuleType) -> bool:
    """Whether a value is one of the records that a module defines: a dataclass or an enumeration."""
    if not isinstance(value, type) or value.__module__ != home.__name__:
        return False
    return dataclasses.is_dataclass(value) or issubclass(value, enum.Enum)


def _current_tables() -> tuple[dict[type, type], dict[type, type]]:
    return _tables(_torch_class("storage", "WriteResult") is not None)


def to_ours(value: Any) -> Any:
    """A record of torch's, with all records in it, as ours. Anything else comes back as it is."""
    return _convert(value, _current_tables()[0])


def to_torch(value: Any) -> Any:
    """A record of ours, with all records in it, as torch's."""
    return _convert(value, _current_tables()[1], opening=True)


def _convert(value: Any, table: dict[type, type], *, opening: bool = False) -> Any:
    """Replace records by those of the other side; what only we defer is ours already, unless ``opening``."""
    kind = type(value)
    if kind is list or (opening and isinstance(value, DeferredList)):
        return [_convert(entry, table, opening=opening) for entry in value]
    if kind is dict or (opening and isinstance(value, DeferredDict)):
        return {
            _convert(key, table, opening=opening): _convert(entry, table, opening=opening)
            for key, entry in value.items()
        }
    made = table.get(kind)
    if made is None:
        return value
    if issubclass(kind, enum.Enum):
        return made[value.name]  # type: ignore[index]
    names = _common_fields(kind, made)  # type: ignore[arg-type] # mypy doubts that a class has a hash
    fields = {name: _convert(getattr(value, name), table, opening=opening) for name in names}
    return made(**fields)


@functools.cache
def _common_fields(kind: type, made: type) -> tuple[str, ...]:
    """The fields that both classes have. Older torch lacks some, which all have a default in ours."""
    known = {field.name for field in dataclasses.fields(made)}
    return tuple(field.name for field in dataclasses.fields(kind) if field.name in known)


def in_plain_types(planner_data: Any) -> Any:
    """Planner data in plain types: in torch's paths the keys of dicts are strings."""
    if not isinstance(planner_data, dict):
        return planner_data
    return {
        key: tuple(str(step) if isinstance(step, TypedKey) else step for step in path)
        if type(path) is tuple
        else path
        for key, path in planner_data.items()
    }


def called_by_torch(asking: object) -> bool:
    """Whether a method of ``asking`` was called by torch's checkpoint package, which wants its own records.

    Overriding methods of a subclass may stand in between.
    """
    methods = {name for cls in type(asking).__mro__ for name in vars(cls)}
    frame = sys._getframe(1)  # noqa: SLF001
    # The frames are not asked for their variables: they would be kept alive, with all the caller's tensors.
    while frame.f_back is not None and (frame.f_globals is globals() or frame.f_code.co_name in methods):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).startswith(_PACKAGE)


def called_by_torch_without_cached_plans(asking: object) -> bool:
    """Whether a method of ``asking`` was called by torch 2.6, whose plans cannot say "as last time"."""
    theirs: Any = _torch_class("planner", "SavePlan")
    return theirs is not None and not hasattr(theirs, "usable") and called_by_torch(asking)


def is_torchs(value: Any, module: str, name: str) -> bool:
    """Whether a value is an instance of torch's class of that name."""
    theirs = _torch_class(module, name)
    return theirs is not None and isinstance(value, theirs)


def serves_torch(method: F) -> F:
    """Let a planner's method that makes plans take torch's records, and return them to torch's package."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = {name: to_ours(value) for name, value in kwargs.items()}
        made = method(self, *map(to_ours, args), **ours)
        return _for_torch(made) if called_by_torch(self) else made

    return cast("F", call)


def _for_torch(made: Any) -> Any:
    if isinstance(made, tuple):
        return tuple(map(_for_torch, made))
    theirs = to_torch(made)
    if isinstance(made, our_metadata_module.Metadata):
        # torch pickles it as it is, and must be able to read it where holdfast is not installed.
        theirs.planner_data = in_plain_types(made.planner_data)
    return theirs
