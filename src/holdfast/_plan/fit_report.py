"""All the reasons why a checkpoint does not fit a state, collected and raised together."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.errors import DtypeMismatchError, MissingKeyError, PlanError, ShapeMismatchError

__all__ = ["FitReport"]

_MOST_LINES = 20


@dataclass
class FitReport:
    """Problems by kind; each is a key and a sentence."""

    missing: list[tuple[str, str]] = field(default_factory=list)
    unexpected: list[tuple[str, str]] = field(default_factory=list)
    shape: list[tuple[str, str]] = field(default_factory=list)
    dtype: list[tuple[str, str]] = field(default_factory=list)
    kind: list[tuple[str, str]] = field(default_factory=list)
    gap: list[tuple[str, str]] = field(default_factory=list)

    def add_missing(self, key: str, there: Iterable[str]) -> None:
        """Note a key that the checkpoint does not have, with the nearest name that it has."""
        near = "" if len(self.missing) >= _MOST_LINES else nearest(key, there)
        # The words that torch has for it: programs look for them.
        self.missing.append((key, f"Missing key in checkpoint{near}"))

    def count(self) -> int:
        """How many problems there are."""
        return sum(len(found) for found in self._all())

    def _all(self) -> list[list[tuple[str, str]]]:
        return [self.missing, self.unexpected, self.shape, self.dtype, self.kind, self.gap]

    def raise_if_any(self) -> None:
        """Raise one error that lists everything; its class is that of the gravest kind.

        Raises:
            MissingKeyError: Something is missing, whatever else there is.
            ShapeMismatchError: Nothing is missing, but a shape differs.
            DtypeMismatchError: Only dtypes differ.
            PlanError: Anything else.
        """
        if not self.count():
            return
        lines = [f"{key}: {sentence}" for found in self._all() for key, sentence in found]
        shown = lines[:_MOST_LINES]
        if len(lines) > len(shown):
            shown.append(f"and {len(lines) - len(shown)} more")
        noun = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
        message = f"the checkpoint does not fit ({noun}; nothing was changed):\n  " + "\n  ".join(shown)
        first_key = next(found[0][0] for found in self._all() if found)
        error: type[PlanError] = PlanError
        if self.missing:
            error = MissingKeyError
        elif self.shape:
            error = ShapeMismatchError
        elif self.dtype and len(self.dtype) == len(lines):
            error = DtypeMismatchError
        raise error(message, key=first_key)


def nearest(key: str, there: Iterable[str]) -> str:
    """A hint at the most similar name, or nothing."""
    close = difflib.get_close_matches(key, list(there)[:20_000], n=1, cutoff=0.75)
    return f" (it has {close[0]})" if close else ""
