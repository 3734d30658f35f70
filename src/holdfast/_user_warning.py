"""Warnings that point at the user's line, however many frames of the package lie between."""

import sys
import types
import warnings

__all__ = ["warn_user"]

# Who stands between the package and its caller: decorators, and what begins a thread.
_BETWEEN = {"holdfast", "contextlib", "functools", "threading", "torch", "typing_extensions"}


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn as ``warnings.warn`` does, with the place of the first frame that is not the package's own.

    A thread that the package has started has no such frame; the warning then points at the caller of this.
    """
    level = 1
    found: types.FrameType | None = sys._getframe()  # noqa: SLF001 - there is no other way to the frames
    while found is not None and found.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        found = found.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level if found is not None else 2)
