"""The options of ``install()``, from its arguments and from the environment."""

import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from holdfast.errors import UsageError

CheckReplicas: TypeAlias = bool | Literal["full", "raise"]

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class InstallOptions:
    """Options of ours that callers of torch's functions cannot pass. None and ``()`` stand for our defaults.

    Attributes:
        strict: As for ``load``.
        cast: As for ``load``.
        check_replicas: As for ``save``.
        allow_pickle: As for ``load``.
        safe_globals: As for ``load``.
    """

    strict: bool | None = None
    cast: bool | None = None
    check_replicas: CheckReplicas | None = None
    allow_pickle: bool | None = None
    safe_globals: tuple[Callable[..., Any] | type, ...] = ()

    def for_load_planner(self) -> dict[str, Any]:
        """The options of a ``DefaultLoadPlanner``."""
        return {
            "strict": self.strict,
            "cast": self.cast,
            "allow_pickle": bool(self.allow_pickle),
            "safe_globals": self.safe_globals,
        }

    def for_save_planner(self) -> dict[str, Any]:
        """The options of a ``DefaultSavePlanner``."""
        return {} if self.check_replicas is None else {"check_replicas": self.check_replicas}


def read_options(given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> InstallOptions:
    """The options that were given; those that are None come from the environment.

    Raises:
        UsageError: A variable has a value that does not exist for its option.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    readers: dict[str, Callable[[str, str], Any]] = {
        "strict": _truth,
        "cast": _truth,
        "check_replicas": _check_replicas,
        "allow_pickle": _truth,
        "safe_globals": named_globals,
    }
    for name, read in readers.items():
        variable = f"HOLDFAST_{name.upper()}"
        text = environment.get(variable, "").strip()
        if text and name not in chosen:
            chosen[name] = read(variable, text)
    chosen["safe_globals"] = tuple(chosen.get("safe_globals", ()))
    if chosen.get("check_replicas") not in (None, True, False, "full", "raise"):
        found = chosen["check_replicas"]
        raise UsageError(f"check_replicas is True, False, 'full' or 'raise', not {found!r}", found=found)
    return InstallOptions(**chosen)


def _truth(variable: str, text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise UsageError(f"{variable} must be 1 or 0, not {text!r}", found=text)
    return text.lower() in _TRUE


def _check_replicas(variable: str, text: str) -> CheckReplicas:
    if text.lower() == "full":
        return "full"
    return "raise" if text.lower() == "raise" else _truth(variable, text)


def named_globals(variable: str, text: str) -> Iterable[Any]:
    """The classes and functions that a list such as ``"package.module:Name, other:Name"`` names.

    Raises:
        UsageError: There is no such thing; the message says that ``variable`` names it.
    """
    for name in filter(None, map(str.strip, text.split(","))):
        module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
        try:
            found: Any = importlib.import_module(module)
            for step in attribute.split("."):
                found = getattr(found, step)
        except (ImportError, ValueError, AttributeError) as error:
            raise UsageError(
                f"{variable} names {name!r}, which cannot be imported: write package.module:Name", found=name
            ) from error
        yield found
