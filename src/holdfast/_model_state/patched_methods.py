"""Methods of single objects replaced, such as ``state_dict``, and the methods that were there before."""

import functools
from collections.abc import Callable
from typing import Any


class PatchedMethod:
    """Takes the place of a method of one object."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def patch_method(owner: object, name: str, call: Callable[..., Any]) -> None:
    """Let ``owner.name`` be ``call`` for this object only."""
    # Compiled modules pass attributes that are set on to the module inside.
    vars(owner)[name] = PatchedMethod(call)


def unpatched_method(owner: object, name: str) -> Callable[..., Any]:
    """The method ``name`` of ``owner`` as it is without ``patch_method``."""
    found: Callable[..., Any] = getattr(owner, name)
    if isinstance(found, PatchedMethod):
        return functools.partial(getattr(type(owner), name), owner)
    return found
