"""A key of a dict that is not a string, in a path made of strings."""

from typing import Any

from typing_extensions import Self


class TypedKey(str):
    """Looks like ``str(value)``, as torch's paths have it, and remembers ``value``."""

    __slots__ = ("value",)
    value: Any

    def __new__(cls, value: Any) -> Self:
        self = super().__new__(cls, str(value))
        self.value = value
        return self

    def __getnewargs__(self) -> tuple[Any]:
        return (self.value,)
