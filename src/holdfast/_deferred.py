"""Lists and dicts whose entries are made when somebody looks at them.

A plan of a million chunks is a handful of columns until somebody wants to see its lines. A look makes the
entries and keeps the columns. Whether both still say the same is found out by comparing them when it matters.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, KeysView
from typing import Any, ClassVar, Generic, TypeVar

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class _UnmadeEntry:
    """Stands alone in the memory of a list or dict whose entries are not made yet.

    C code that reads this memory without asking the object (json looks at the length there; others at the
    entries) finds it not empty, and an entry that it cannot work with instead of none.
    """

    def __repr__(self) -> str:
        return "<an entry that is not made yet>"


_UNMADE: Any = _UnmadeEntry()
_publishing = threading.Lock()


def _renew_lock() -> None:
    """In a forked child: a thread that does not exist there may have held the lock."""
    global _publishing  # noqa: PLW0603
    _publishing = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class _DeferredType(type):
    """A class of deferred containers; called as ``list`` or ``dict`` are called, it makes a plain one.

    ``dataclasses.asdict`` and others call ``type(x)`` with the entries of a copy.
    """

    plain: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and not (len(args) == 1 and isinstance(args[0], Iterable)):
            return super().__call__(*args, **kwargs)
        if cls.plain is dict and args and isinstance(args[0], Iterator):
            # asdict makes a dict of a key that is a record, too; the tuple of its values can be a key.
            args = ([(tuple(k.values()) if isinstance(k, dict) else k, entry) for k, entry in args[0]],)
        return cls.plain(*args, **kwargs)


class _Deferred(metaclass=_DeferredType):
    """The common base of deferred lists and dicts."""

    __slots__ = ()

    _count: int
    _is_made: bool
    _make: Callable[[], Iterable[Any]] | None

    @property
    def is_open(self) -> bool:
        """Whether the entries differ from what they were made from, as far as they have been made.

        Costs as much as making the entries that somebody has looked at.
        """
        if self._make is None:
            return True
        if self._is_made and self._has_changed():
            self._detach()
        return self._make is None

    def open(self) -> None:
        """Make the entries. If that raises, the next look tries again.

        Several threads may do it at once: all of them see the entries of the one that finished first. No lock
        is held while entries are made, since that may read files.
        """
        make = self._make
        if self._is_made:
            return
        assert make is not None
        made = type(self).plain(make())
        with _publishing:
            if not self._is_made:
                self._fill(made)
                self._is_made = True  # type: ignore[misc] # a slot of the subclass

    def _detach(self) -> None:
        """The entries are the only truth from here on."""
        self.open()
        self._make = None  # type: ignore[misc] # a slot of the subclass

    def _has_changed(self) -> bool:
        """Whether the entries, which have been made, differ from what they were made from."""
        assert self._make is not None
        return bool(self != type(self).plain(self._make()))

    def _fill(self, made: Any) -> None:
        raise NotImplementedError

    def __bool__(self) -> bool:
        return len(self) > 0  # type: ignore[arg-type]

    def __copy__(self) -> Any:
        return type(self).plain(self)

    copy = __copy__

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self).plain, (self.copy(),)


class DeferredList(_Deferred, list[T], Generic[T]):
    """A list whose entries are made, all at once, when one is asked for.

    It is a real list: whoever looks at it cannot tell. ``len`` does not count as a look. Copies and pickles
    are plain lists.

    Args:
        count: How many entries there will be.
        make: Makes them. It may be called more than once, and by several threads.
        columns: What ``make`` makes them from.
    """

    __slots__ = ("_columns", "_count", "_is_made", "_make")
    plain: ClassVar[Any] = list

    def __init__(self, count: int, make: Callable[[], Iterable[T]], columns: Any = None) -> None:
        super().__init__((_UNMADE,) if count else ())
        self._count = count
        self._is_made = False
        self._make = make
        self._columns = columns

    @property
    def columns(self) -> Any:
        """The columns that the entries were made from; None if entries were changed (see ``is_open``)."""
        return None if self.is_open else self._columns

    def _fill(self, made: list[T]) -> None:
        list.__setitem__(self, slice(None), made)

    def __len__(self) -> int:
        return list.__len__(self) if self._is_made else self._count

    def __eq__(self, other: object) -> bool:
        if (
            isinstance(other, DeferredList)
            and not (self._is_made or other._is_made)
            and self._make == other._make
        ):
            return True
        self.open()
        if isinstance(other, _Deferred):
            other.open()
        return list.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __radd__(self, before: Any) -> Any:
        # The base adds lists on its own, to the list itself for ``+=``, but reads the memory of this one.
        self.open()
        return NotImplemented


class DeferredDict(_Deferred, dict[K, V], Generic[K, V]):
    """A dict whose entries are made, all at once, when one is asked for.

    It is a real dict: whoever looks at it cannot tell. ``len`` does not count as a look. Copies and pickles
    are plain dicts.

    Args:
        count: How many entries there will be.
        make: Makes them. It may be called more than once, and by several threads.
    """

    __slots__ = ("_count", "_is_made", "_make")
    plain: ClassVar[Any] = dict

    def __init__(self, count: int, make: Callable[[], Iterable[tuple[K, V]]]) -> None:
        super().__init__()
        if count:
            dict.__setitem__(self, _UNMADE, _UNMADE)
        self._count = count
        self._is_made = False
        self._make = make

    def _fill(self, made: dict[K, V]) -> None:
        dict.clear(self)
        dict.update(self, made)

    def __len__(self) -> int:
        return dict.__len__(self) if self._is_made else self._count


class _Keys(KeysView[Any]):
    def __reversed__(self) -> Iterator[Any]:
        return iter([*self][::-1])


class DeferredEntries(DeferredDict[str, V], Generic[V]):
    """As its base, with the keys known from the start: a look at one key makes the entry of that key only.

    Args:
        numbers: The keys in order, each with its number.
        make: Makes the entry of a key, given its number.
    """

    __slots__ = ("_make_one", "_numbers", "_seen")

    def __init__(self, numbers: dict[str, int], make: Callable[[str, int], V]) -> None:
        super().__init__(len(numbers), self._make_all)
        self._numbers = numbers
        self._make_one = make
        # The entries that somebody has looked at.
        self._seen: dict[str, V] = {}

    def _make_all(self) -> Iterable[tuple[str, V]]:
        return [(key, self._see(key)) for key in self._numbers]

    def _see(self, key: str) -> V:
        if key in self._seen:
            return self._seen[key]
        # Where two threads look at one key at once, both get the entry of the first.
        return self._seen.setdefault(key, self._make_one(key, self._numbers[key]))

    @property
    def is_open(self) -> bool:
        """Whether an entry that was made differs from what it was made from."""
        if self._make is not None and any(
            entry != self._make_one(key, self._numbers[key]) for key, entry in [*self._seen.items()]
        ):
            self._detach()
        return self._make is None

    def __getitem__(self, key: str) -> V:
        return dict.__getitem__(self, key) if self._is_made else self._see(key)

    def get(self, key: str, default: Any = None) -> Any:
        """The entry, or the default."""
        return self[key] if key in self else default  # noqa: SIM401 - this is the method that it proposes

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) if self._is_made else key in self._numbers

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self) if self._is_made else iter(self._numbers)

    def keys(self) -> Any:
        """The keys; no entry is made for them."""
        return _Keys(self)


def _after(prepare: Callable[[Any], None], method: Callable[..., Any]) -> Any:
    def prepared(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepare(self)
        for other in args:
            # The base's code would read its memory.
            if isinstance(other, _Deferred):
                other.open()
        return method(self, *args, **kwargs)

    prepared.__name__ = prepared.__qualname__ = method.__name__
    prepared.__doc__ = method.__doc__
    return prepared


def _define(cls: type[_Deferred], looks: str, changes: str) -> None:
    """Give a class the methods of its base, each after what must happen before it."""
    for prepare, names in ((_Deferred.open, looks), (_Deferred._detach, changes)):  # noqa: SLF001
        for name in names.split():
            setattr(cls, name, _after(prepare, getattr(cls.plain, name)))


# Python's own code for lists and dicts asks a subclass that has its own __iter__, and does not read the
# memory of the base.
_define(
    DeferredList,
    "__getitem__ __iter__ __reversed__ __contains__ __repr__ __lt__ __le__ __gt__ __ge__ __add__ "
    "__mul__ __rmul__ count index",
    "__setitem__ __delitem__ __iadd__ __imul__ append clear extend insert pop remove reverse sort",
)
_define(
    DeferredDict,
    "__getitem__ __iter__ __reversed__ __contains__ __repr__ __eq__ __ne__ __or__ __ror__ get items keys "
    "values",
    "__setitem__ __delitem__ __ior__ clear pop popitem setdefault update",
)
