"""Lists and dicts whose entries are made when somebody looks at them.

A plan of a million chunks is a handful of columns until somebody wants to see its lines. What is seen may be
changed, so from the first look on the entries are the truth, and the columns are let go.
"""

from collections.abc import Callable, Iterable, Iterator, KeysView
from typing import Any, Generic, TypeVar

__all__ = ["DeferredDict", "DeferredEntries", "DeferredList"]

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class DeferredList(list[T], Generic[T]):
    """A list whose entries are made, all at once, when one is asked for.

    It is a real list: whoever looks at it cannot tell. ``len`` does not count as a look.
    """

    __slots__ = ("_count", "_make")

    def __init__(self, count: int, make: Callable[[], Iterable[T]]) -> None:
        super().__init__()
        self._count = count
        self._make: Callable[[], Iterable[T]] | None = make

    @property
    def is_open(self) -> bool:
        """Whether the entries have been made."""
        return self._make is None

    def open(self) -> None:
        """Make the entries."""
        if self._make is not None:
            made, self._make = self._make(), None
            list.extend(self, made)
            self.let_go()

    def let_go(self) -> None:
        """Called once the entries are made: what they were made from is not needed any more."""

    def __len__(self) -> int:
        return self._count if self._make is not None else list.__len__(self)

    def __bool__(self) -> bool:
        return len(self) > 0

    def __radd__(self, before: list[T]) -> list[T]:
        return [*before, *self]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, ([*self],)


class DeferredDict(dict[K, V], Generic[K, V]):
    """A dict whose entries are made, all at once, when one is asked for.

    It is a real dict: whoever looks at it cannot tell. ``len`` does not count as a look.
    """

    __slots__ = ("_count", "_make")

    def __init__(self, count: int, make: Callable[[], Iterable[tuple[K, V]]]) -> None:
        super().__init__()
        self._count = count
        self._make: Callable[[], Iterable[tuple[K, V]]] | None = make

    @property
    def is_open(self) -> bool:
        """Whether entries have been made, and may have been changed since."""
        return self._make is None

    def open(self) -> None:
        """Make the entries."""
        if self._make is not None:
            made, self._make = self._make(), None
            dict.update(self, made)

    def __len__(self) -> int:
        return self._count if self._make is not None else dict.__len__(self)

    def __bool__(self) -> bool:
        return len(self) > 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, ({**self},)


class DeferredEntries(DeferredDict[str, V], Generic[V]):
    """As its base, with the keys known from the start: a look at one key makes the entry of that key only.

    Args:
        numbers: The keys in order, each with its number.
        make: Makes the entry of a key, given its number.
    """

    __slots__ = ("_make_one", "_numbers")

    def __init__(self, numbers: dict[str, int], make: Callable[[str, int], V]) -> None:
        super().__init__(len(numbers), self._make_all)
        self._numbers = numbers
        self._make_one = make

    @property
    def is_open(self) -> bool:
        """Whether any entry has been made, and may have been changed since."""
        return self._make is None or dict.__len__(self) > 0

    def _make_all(self) -> Iterable[tuple[str, V]]:
        seen = dict(dict.items(self))
        dict.clear(self)
        make = self._make_one
        for key, number in self._numbers.items():
            yield key, seen[key] if key in seen else make(key, number)

    def __getitem__(self, key: str) -> V:
        if self._make is None or dict.__contains__(self, key):
            return dict.__getitem__(self, key)
        value = self._make_one(key, self._numbers[key])
        dict.__setitem__(self, key, value)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """The entry, or the default."""
        if key not in self:
            return default
        return self[key]

    def __contains__(self, key: object) -> bool:
        return key in self._numbers if self._make is not None else dict.__contains__(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers) if self._make is not None else dict.__iter__(self)

    def keys(self) -> Any:
        """The keys; no entry is made for them."""
        return KeysView(self)


def _after_opening(base: type, name: str) -> Any:
    method = getattr(base, name)

    def opened(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.open()
        for other in args:
            if isinstance(other, DeferredList | DeferredDict):
                other.open()
        return method(self, *args, **kwargs)

    opened.__name__ = opened.__qualname__ = name
    opened.__doc__ = method.__doc__
    return opened


# Everything that looks at the entries. Python's own code for lists and dicts asks a subclass that has its
# own __iter__, and does not reach into the memory of the base.
for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__iter__", "__reversed__", "__contains__", "__repr__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__add__", "__iadd__", "__mul__"),
    *("__imul__", "__rmul__", "append", "clear", "copy", "count", "extend", "index", "insert", "pop"),
    *("remove", "reverse", "sort"),
):
    setattr(DeferredList, _name, _after_opening(list, _name))
for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__iter__", "__reversed__", "__contains__", "__repr__"),
    *("__eq__", "__ne__", "__or__", "__ror__", "__ior__", "clear", "copy", "get", "items", "keys", "pop"),
    *("popitem", "setdefault", "update", "values"),
):
    setattr(DeferredDict, _name, _after_opening(dict, _name))
