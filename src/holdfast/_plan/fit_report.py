"""All the reasons why a checkpoint does not fit a state, collected and raised together."""

import difflib
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Literal, TypeAlias, get_args

from holdfast.errors import DtypeMismatchError, MissingKeyError, PlanError, ShapeMismatchError

_MOST_LINES = 6
_MOST_KEPT = 1_000
_MOST_TRIED = 3
_MOST_COMPARED = 5_000
_SAMPLE = 50

Kind: TypeAlias = Literal["missing", "unexpected", "shape", "dtype", "kind"]
"""The kinds of problems, in the order in which they are listed."""

# The words that torch has for it: programs look for them.
_MISSING = "Missing key in checkpoint"

_WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module"})
"""What DistributedDataParallel, ``torch.compile`` and activation checkpointing put into names of a model."""
_OF_WRAPPERS = (
    "The names differ by what wraps the model (torch.compile, DistributedDataParallel). Save and load "
    "holdfast.state_dict.get_model_state_dict(model), or a TrainingState, instead of the model itself: their "
    "names do not show wrappers. docs/state_dicts.md says how to load this checkpoint."
)
_IF_MISSING = "To leave what is missing as it is, pass allow_partial_load=True."
_IF_SHAPES_DIFFER = "To leave tensors of other shapes as they are, pass ignore_mismatched_sizes=True."


class FitReport:
    """Problems by kind; each is a key and a sentence."""

    def __init__(self) -> None:
        self._problems: dict[str, list[tuple[str, str]]] = {kind: [] for kind in get_args(Kind)}

    def add(self, kind: Kind, key: str, sentence: str) -> None:
        """Note a problem."""
        self._problems[kind].append((key, sentence))

    def add_missing(self, key: str, why: str = "") -> None:
        """Note a key that the checkpoint does not have, with the reason if it is known."""
        self.add("missing", key, f"{_MISSING}: {why}" if why else _MISSING)

    def raise_if_any(self, unclaimed: Callable[[], Iterable[str]] = tuple) -> None:
        """Raise one error for everything: the message has a few lines, ``found`` every problem, up to 1,000.

        Args:
            unclaimed: Returns the keys of the checkpoint that the state does not have: what is missing may be
                there under one of these names.

        Raises:
            MissingKeyError: Something is missing, whatever else there is.
            ShapeMismatchError: Nothing is missing, but a shape differs.
            DtypeMismatchError: Only dtypes differ.
            PlanError: Anything else.
        """
        found = [problem for problems in self._problems.values() for problem in problems]
        if not found:
            return
        missing = [key for key, sentence in self._problems["missing"] if sentence == _MISSING]
        told, has_no_name = _lines_of_missing(missing, set(unclaimed())) if missing else ([], False)
        told += [(f"{key}: {sentence}", 1) for key, sentence in found if sentence != _MISSING]
        lines = [line for line, _ in told[:_MOST_LINES]]
        left = sum(count for _, count in told[_MOST_LINES:])
        if left:
            lines.append(f"and {left} more")
        remedies = {_IF_MISSING: has_no_name, _IF_SHAPES_DIFFER: bool(self._problems["shape"])}
        lines += [remedy for remedy, helps in remedies.items() if helps]
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
            found=[f"{key}: {sentence}" for key, sentence in found[:_MOST_KEPT]],
        )


def _lines_of_missing(missing: list[str], unclaimed: set[str]) -> tuple[list[tuple[str, int]], bool]:
    """Lines, and how many keys each is about; and whether some keys may not be there under any name.

    Keys that are there with another prefix are one line.
    """
    lines: list[tuple[str, int]] = []
    bare = {_without_wrappers(name): name for name in unclaimed}
    wrapped = {key: bare[name] for key in missing if (name := _without_wrappers(key)) in bare}
    if wrapped:
        key, there = next(iter(wrapped.items()))
        more = f", and {len(wrapped) - 1} more in the same way" if len(wrapped) > 1 else ""
        lines += [(f"{key}: {_MISSING} (it has {there}){more}", len(wrapped)), (_OF_WRAPPERS, 0)]
        missing = [key for key in missing if key not in wrapped]
    prefixes, is_under_another_key = _other_prefix(missing, unclaimed), True
    if prefixes is not None:
        old, new = prefixes
        moved = [key for key in missing if key.startswith(old) and new + key[len(old) :] in unclaimed]
        more = f", and {len(moved) - 1} more with the same other prefix" if len(moved) > 1 else ""
        there = new + moved[0][len(old) :]
        lines.append((f"{moved[0]}: {_MISSING} (it has {there}){more}", len(moved)))
        asked, stored = _without_common_end(old.split("."), new.split("."))
        is_under_another_key = len(asked) <= 1 and len(stored) <= 1
        if is_under_another_key:
            lines.append((_under_its_key("".join(asked), "".join(stored)), 0))
        are_told = set(moved)
        missing = [key for key in missing if key not in are_told]
    names = sorted(unclaimed)[:_MOST_COMPARED]
    for number, key in enumerate(missing):
        close = difflib.get_close_matches(key, names, n=1, cutoff=0.75) if number < _MOST_LINES else []
        lines.append((f"{key}: {_MISSING}" + (f" (it has {close[0]})" if close else ""), 1))
    return lines, bool(missing) or not is_under_another_key


def _without_common_end(asked: list[str], stored: list[str]) -> tuple[list[str], list[str]]:
    while asked and stored and asked[-1] == stored[-1]:
        asked, stored = asked[:-1], stored[:-1]
    return asked, stored


def _under_its_key(asked: str, stored: str) -> str:
    """Advice for keys that the checkpoint has under another first key than the state, or under none."""
    if not stored:
        return f"The checkpoint has them without {asked!r}: load what stands there in your state by itself."
    instead = f", not under {asked!r}" if asked else ""
    return f"Load them under the key that the checkpoint has{instead}: {{{stored!r}: ...}}."


def _without_wrappers(name: str) -> str:
    return ".".join(step for step in name.split(".") if step not in _WRAPPERS)


def _other_prefix(missing: list[str], unclaimed: Collection[str]) -> tuple[str, str] | None:
    """The prefix of missing keys, and the one that most of these keys have in the checkpoint."""
    for key in missing[:_MOST_TRIED]:
        steps = key.split(".")
        for depth in range(len(steps)):
            end = ".".join(steps[depth:])
            old = key[: len(key) - len(end)]
            ends = [one[len(old) :] for one in missing if one.startswith(old)][:_SAMPLE]
            # A single name, such as ``weight``, is at the end of too many others to tell anything.
            if "." not in end and len(ends) == 1:
                continue
            there = (one for one in unclaimed if one == end or one.endswith(f".{end}"))
            for new in {one[: len(one) - len(end)] for one in islice(there, _SAMPLE)}:
                if 2 * sum(new + one in unclaimed for one in ends) >= len(ends):
                    return old, new
    return None
