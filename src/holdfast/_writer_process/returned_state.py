"""What a storage writer has noted in the writer process, on its way back to the trainer.

A commit may need what a write has noted in attributes of the writer. Only attributes that changed go back,
each pickled once. A writer says by ``__getstate__``, as for any pickle, which attributes other processes see.
"""

import contextlib
import pickle
from collections import deque
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

from holdfast._context import SaveContext
from holdfast.errors import UsageError

_NOT_LOOKED_INTO = (type, ModuleType, FunctionType, BuiltinFunctionType, SaveContext)


class WriteAnswer(NamedTuple):
    """What the writer process tells of a write besides what its storage writer has noted.

    Attributes:
        results: What ``write_data`` has returned.
        seconds: How long that took. The rest of the time that the trainer waited went into handing over.
        events: How often something happened that should not be needed.
    """

    results: Any
    seconds: float
    events: dict[str, int]


class ReturnedState:
    """Finds the attributes of a writer that were changed since this object was made.

    An attribute counts as changed if it has another value, or if its value, or anything inside of that, has
    gained, lost or replaced an entry or an attribute. Changes inside of arrays and tensors are not seen.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        # The objects themselves, not their ids: an object that is dropped may leave its id to another one.
        self._before = {name: _reachable(value) for name, value in _state(writer).items()}

    def pickled(self, answer: Any) -> bytes:
        """Pickle the answer to a request, and a dict of the changed attributes.

        Raises:
            UsageError: A changed attribute cannot be pickled; the error names it.
        """
        changed = {
            name: value
            for name, value in _state(self._writer).items()
            if name not in self._before or not _same(self._before[name], _reachable(value))
        }
        try:
            return pickle.dumps((answer, changed), pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            names = [name for name, value in changed.items() if pickling_error(value, pickle.dumps)]
            which = ", ".join(f"{type(self._writer).__qualname__}.{name}" for name in names) or "its results"
            raise UsageError(
                f"write_data has set {which} in the process that writes, which cannot be sent back to the "
                f"trainer: {error}. Make it picklable, leave it out by __getstate__, or save in a thread.",
                found=which,
            ) from error


def pickling_error(value: Any, dump: Callable[[Any], object]) -> Exception | None:
    """The error that ``dump`` raises for a value; None if the value can be pickled."""
    try:
        dump(value)
    except Exception as error:  # noqa: BLE001 - __reduce__ of strangers may raise anything
        return error
    return None


def _state(writer: Any) -> dict[str, Any]:
    """The attributes that a pickle of the writer would have, as they are here."""
    reduced = writer.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    state = reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 else None
    parts = state if isinstance(state, tuple) else (state,)  # two of them in a class with __slots__
    known = set(dir(writer))
    names = [name for part in parts if isinstance(part, dict) for name in part if name in known]
    return {name: getattr(writer, name) for name in names}


def _reachable(value: Any) -> list[Any]:
    """A value and everything inside of it, in an order that depends on its structure only."""
    found, seen, waiting = [], set(), [value]
    while waiting:
        entry = waiting.pop()
        found.append(entry)
        if id(entry) in seen or isinstance(entry, _NOT_LOOKED_INTO):
            continue
        seen.add(id(entry))
        if isinstance(entry, dict):
            waiting += [*entry, *entry.values()]
        elif isinstance(entry, list | tuple | set | frozenset | deque):
            waiting += entry
        with contextlib.suppress(TypeError):  # it has no attributes
            waiting.append(vars(entry))
    return found


def _same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))
