"""All the reasons why a checkpoint does not fit a state, collected and raised together."""

import difflib
from collections.abc import Iterable
from typing import Literal, TypeAlias, get_args

from holdfast.errors import DtypeMismatchError, MissingKeyError, PlanError, ShapeMismatchError

_MOST_LINES = 20

Kind: TypeAlias = Literal["missing", "unexpected", "shape", "dtype", "kind"]
"""The kinds of problems, in the order in which they are listed."""


class FitReport:
    """Problems by kind; each is a key and a sentence."""

    def __init__(self) -> None:
        self._problems: dict[str, list[tuple[str, str]]] = {kind: [] for kind in get_args(Kind)}

    def add(self, kind: Kind, key: str, sentence: str) -> None:
        """Note a problem."""
        self._problems[kind].append((key, sentence))

    def add_missing(self, key: str, there: Iterable[str], why: str = "") -> None:
        """Note a key that the checkpoint does not have: with the reason, or the nearest name that it has."""
        if why:
            why = f": {why}"
        elif len(self._problems["missing"]) < _MOST_LINES:
            why = _nearest(key, there)
        # The words that torch has for it: programs look for them.
        self.add("missing", key, f"Missing key in checkpoint{why}")

    def raise_if_any(self) -> None:
        """Raise one error that lists everything.

        Raises:
            MissingKeyError: Something is missing, whatever else there is.
            ShapeMismatchError: Nothing is missing, but a shape differs.
            DtypeMismatchError: Only dtypes differ.
            PlanError: Anything else.
        """
        found = [problem for problems in self._problems.values() for problem in problems]
        if not found:
            return
        lines = [f"{key}: {sentence}" for key, sentence in found[:_MOST_LINES]]
        if len(found) > len(lines):
            lines.append(f"and {len(found) - len(lines)} more")
        noun = "1 problem" if len(found) == 1 else f"{len(found)} problems"
        error = PlanError
        if len(self._problems["dtype"]) == len(found):
            error = DtypeMismatchError
        elif self._problems["missing"]:
            error = MissingKeyError
        elif self._problems["shape"]:
            error = ShapeMismatchError
        raise error(
            f"the checkpoint does not fit ({noun}; nothing was changed):\n  " + "\n  ".join(lines),
            key=found[0][0],
        )


def _nearest(key: str, there: Iterable[str]) -> str:
    """The most similar name in words, or nothing if none is similar."""
    close = difflib.get_close_matches(key, list(there)[:20_000], n=1, cutoff=0.75)
    return f" (it has {close[0]})" if close else ""
