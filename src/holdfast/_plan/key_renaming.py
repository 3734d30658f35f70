"""The names that keys get on their way into another place: a caller's function or dict, checked."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

from holdfast._plan.flatten import check_text
from holdfast.errors import UsageError

Rename: TypeAlias = Callable[[str], str] | Mapping[str, str]
"""What a key is called in a target: a function of it, or new names for some keys."""


def renaming(rename: Rename, *, with_below: bool = False) -> Callable[[str], str]:
    """The function that gives a key its new name, and raises UsageError if that is no name.

    Args:
        rename: What the caller said.
        with_below: Whether the names in a dict also stand for whatever is below them. An empty new name then
            takes that step away.

    Raises:
        UsageError: It is neither a function nor a dict from text.
    """
    if isinstance(rename, Mapping):
        for old, new in cast("Mapping[object, object]", rename).items():
            if not isinstance(old, str):
                raise UsageError(f"rename has a new name for {old!r}, and keys are text", found=old)
            if not isinstance(new, str):
                raise UsageError(f"{old}: rename gives {new!r}, which cannot be a name", key=old, found=new)
        return _checked(_prefixes(rename) if with_below else lambda key: rename.get(key, key))
    if not callable(rename):
        raise UsageError(
            f"rename is a function of a key, or a dict with new names, not {rename!r}", found=rename
        )
    return _checked(rename)


def _prefixes(rename: Mapping[str, str]) -> Callable[[str], str]:
    # The longest name first, so that what is said of a part of it wins.
    names = sorted(rename.items(), key=lambda pair: -len(pair[0]))

    def renamed(key: str) -> str:
        for old, new in names:
            if key == old:
                return new
            if key.startswith(f"{old}."):
                rest = key[len(old) + 1 :]
                return f"{new}.{rest}" if new else rest
        return key

    return renamed


def _checked(rename: Callable[[str], str]) -> Callable[[str], str]:
    def renamed(key: str) -> str:
        name: Any = rename(key)
        if not isinstance(name, str) or not name:
            raise UsageError(f"{key}: rename gives {name!r}, which cannot be a name", key=key, found=name)
        check_text(name)
        return name

    return renamed
