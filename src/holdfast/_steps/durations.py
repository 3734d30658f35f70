"""Lengths of time as people write them: 90, "90s", "15m", "24h", "7d"."""

import contextlib
import re
from datetime import timedelta
from typing import TypeAlias

from holdfast.errors import UsageError

Duration: TypeAlias = float | str | timedelta
"""Seconds, a text such as "24h", or a timedelta."""

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_TEXT = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([a-z]*)\s*", re.IGNORECASE)


def seconds_of(duration: Duration) -> float:
    """A length of time in seconds.

    Raises:
        UsageError: It is not one, or is negative.
    """
    seconds: float | None = None
    if isinstance(duration, timedelta):
        seconds = duration.total_seconds()
    elif isinstance(duration, str):
        found = _TEXT.fullmatch(duration)
        if found and found[2].lower() in _UNITS:
            seconds = float(found[1]) * _UNITS[found[2].lower()]
    elif not isinstance(duration, bool):
        with contextlib.suppress(TypeError, ValueError):
            seconds = float(duration)
    if seconds is None or not 0 <= seconds < float("inf"):
        raise UsageError(
            f"{duration!r} is not a length of time: write seconds as a number, or a text such as '90s', "
            "'15m', '24h' or '7d'",
            found=duration,
        )
    return seconds
