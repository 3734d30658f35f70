"""Bytes, rates, seconds, shapes and long lists as people read them."""

from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import islice

__all__ = ["rate_text", "seconds_text", "shape_text", "size_text", "some_of"]

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


@lru_cache(maxsize=4096)
def size_text(nbytes: int | None) -> str:
    """A size for people; ``?`` for one that is not known."""
    if nbytes is None:
        return "?"
    if nbytes < 1024:
        return f"{nbytes} B"
    value, unit = nbytes / 1024, 0
    # 1023.96 would be printed as 1024.0.
    while value >= 1023.95 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    return f"{value:.1f} {_UNITS[unit]}"


def rate_text(nbytes_per_second: float) -> str:
    """Bytes a second for people."""
    return f"{size_text(int(nbytes_per_second))}/s"


def seconds_text(seconds: float) -> str:
    """A duration for people: ``0.012 s``, ``3.4 s``, ``2:05 min``, ``1:02:03 h``."""
    if seconds < 0.995:
        return f"{seconds:.3f} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


@lru_cache(maxsize=4096)  # models repeat their shapes layer by layer
def shape_text(shape: Sequence[int]) -> str:
    """A shape as torch shows it."""
    return f"[{', '.join(map(str, shape))}]"


def some_of(names: Collection[object], most: int, separator: str = ", ") -> str:
    """The first names of many, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(map(str, islice(names, most))) + more
