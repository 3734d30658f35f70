"""Whether a load that may leave keys out fills anything of each group of keys; over all ranks.

A group is what stands under one key of the state, such as ``model``. Where all keys lie below one container,
as in ``{"app": {"model": ..., "optimizer": ...}}``, it is what stands under one key of that container. If
nothing of a group is found although the checkpoint has it, under these names or others, that is an error and
not a partial load.

Keys that stand in the state itself, as in ``model.state_dict()``, are grouped by their first names. That the
checkpoint has other keys with the same first name says nothing there: a layer may have been replaced.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from holdfast.errors import MissingKeyError, ShapeMismatchError, UsageError
from holdfast.load_result import LoadResult

_MOST_TRIED = 10
_SAMPLE = 100


@dataclass(frozen=True)
class GroupFit:
    """One rank's findings, which it sends to the coordinator.

    Attributes:
        asks: Whether the rank's state has anything to fill, or is of no concern.
        loads: Whether something of it is loaded.
        found: The groups of which the checkpoint has at least one key.
        unfilled: The groups of which it has none, each with a key of it and the reason why that is an error,
            which is empty if it is none.
        mismatched: A key that the checkpoint has in another shape.
        alike: If nothing is loaded: the key of the checkpoint that is most like the first one that is asked
            for.
    """

    asks: bool = True
    loads: bool = True
    found: frozenset[str] = frozenset()
    unfilled: dict[str, tuple[str, str]] = field(default_factory=dict)
    mismatched: str | None = None
    alike: str | None = None


def fit_groups(result: LoadResult, paths: Mapping[str, Any], stored: Collection[str]) -> GroupFit:
    """Look at what a rank's plan loads and leaves alone.

    Args:
        result: The keys.
        paths: The paths of the keys of the state.
        stored: The keys of the checkpoint.
    """
    groups = _groups_of([*result.loaded, *result.left_alone], paths)
    found = {groups[key] for key in result.loaded}
    missing: dict[str, list[str]] = {}
    mismatched = None
    for key in result.left_alone:
        if key in stored:
            mismatched = key
            found.add(groups[key])
        else:
            missing.setdefault(groups[key], []).append(key)
    asked = {*result.loaded, *result.left_alone} if missing.keys() - found else set[str]()
    unfilled = {
        group: (keys[0], _why_wrong(group, keys, stored, asked, is_key=len(paths.get(keys[0], ())) > 1))
        for group, keys in missing.items()
        if group not in found
    }
    first = next((key for key, _ in unfilled.values()), None)
    return GroupFit(
        loads=bool(result.loaded),
        found=frozenset(found),
        unfilled=unfilled,
        mismatched=mismatched,
        alike=None if result.loaded or first is None else _most_alike(first, stored),
    )


def _groups_of(keys: list[str], paths: Mapping[str, Any]) -> dict[str, str]:
    """The group of each key of a state."""
    # Nearly every state has several keys at the top, and these are the groups.
    roots: dict[str, str] = {}
    for key in keys:
        path = paths.get(key, ())
        roots[key] = str(path[0]) if len(path) > 1 else key.partition(".")[0]
    if len(set(roots.values())) > 1:
        return roots
    steps = {key: _steps(key, paths) for key in keys}
    containers = {one[:-1] for one in steps.values()}
    # What the first and the last in order have in common, all have.
    common = _count_same(min(containers, default=()), max(containers, default=()))
    depth = max(common if len(containers) == 1 else common + 1, 1)
    return {key: ".".join(one[:depth]) for key, one in steps.items()}


def _steps(key: str, paths: Mapping[str, Any]) -> tuple[str, ...]:
    path = paths.get(key, ())
    # The keys of a model's state dict that is the state itself: their dots are all that they tell.
    return tuple(map(str, path)) if len(path) > 1 else tuple(key.split("."))


def refuse_unfilled(fits: Sequence[GroupFit]) -> None:
    """On the coordinator: raise if what the ranks found together is not what a load can mean.

    Raises:
        UsageError: No rank has anything to fill.
        MissingKeyError: Nothing of the state is in the checkpoint; or nothing of a group is, though the
            checkpoint has it.
        ShapeMismatchError: Nothing of the state is in the checkpoint in the same shape.
    """
    if not any(fit.asks for fit in fits):
        raise UsageError(
            "the state to load into is empty, so there is nothing to load, and the checkpoint is not. Give a "
            "state with the tensors and values to fill, such as {'model': model}. To get everything that the "
            "checkpoint has without a state, pass planner=EmptyStateDictLoadPlanner() and an empty dict"
        )
    found = {group for fit in fits for group in fit.found}
    wrong = {
        group: (key, reason)
        for fit in fits
        for group, (key, reason) in fit.unfilled.items()
        if reason and not any(_is_within(group, there) for there in found)
    }
    if not wrong and any(fit.loads for fit in fits if fit.asks):
        return
    lines = [reason for _, reason in wrong.values()]
    mismatched = next((fit.mismatched for fit in fits if fit.mismatched is not None), None)
    if not wrong and mismatched is not None:
        raise ShapeMismatchError(
            "nothing would be loaded (nothing was changed): the shapes of all tensors differ, such as that "
            f"of {mismatched}",
            key=mismatched,
        )
    absent, alike = next(((key, fit.alike) for fit in fits for key, _ in fit.unfilled.values()), (None, None))
    nothing = f"nothing of the state is in the checkpoint: the state asks for {absent!r}"
    raise MissingKeyError(
        "the checkpoint does not fit, also for a partial load (nothing was changed):\n  "
        + "\n  ".join(lines or [f"{nothing}; the checkpoint has {alike!r}" if alike else nothing]),
        key=next((key for key, _ in wrong.values()), absent),
    )


def _is_within(group: str, other: str) -> bool:
    """Whether one of two groups contains the other: ranks may divide different states differently."""
    return group == other or group.startswith(f"{other}.") or other.startswith(f"{group}.")


def _why_wrong(group: str, keys: list[str], stored: Collection[str], asked: set[str], *, is_key: bool) -> str:
    """Why it is an error that the checkpoint has none of the keys; empty if it is none.

    ``is_key`` says whether the group is what stands under a key of the state, and not only a first name.
    """
    has_group = is_key and any(key == group or key.startswith(f"{group}.") for key in stored)
    pair = _same_names(keys, stored, asked, group if is_key else None)
    if pair is None and not has_group:
        return ""
    key, there = pair or (keys[0], _most_alike(keys[0], stored))
    count = f"the key {key!r}" if len(keys) == 1 else f"none of the {len(keys)} keys under {group!r}"
    verb = "is not" if len(keys) == 1 else "is"
    return f"{count} {verb} in the checkpoint: the checkpoint has {there!r}; the state asks for {key!r}"


def _same_names(
    keys: list[str], stored: Collection[str], asked: set[str], group: str | None
) -> tuple[str, str] | None:
    """A key and what it is called in the checkpoint, if most keys are there with a prefix more or less.

    Or if there are several, and all are there with another name in the place of ``group``, if that is given.
    A name without a dot, such as ``step``, is at the end of too many others to tell anything.
    """
    if len(keys) == 1 and "." not in keys[0]:
        return None
    keys = keys[:_SAMPLE]
    for key in keys[:_MOST_TRIED]:
        steps = key.split(".")
        shorter = (".".join(steps[depth:]) for depth in range(1, len(steps)))
        longer = (name for name in stored if name.endswith(f".{key}"))
        for there in chain((name for name in shorter if name in stored), longer):
            less, more = key[: max(0, len(key) - len(there))], there[: max(0, len(there) - len(key))]
            renamed = [more + one[len(less) :] for one in keys if one.startswith(less)]
            if there not in asked and 2 * sum(name in stored for name in renamed) >= len(keys):
                return key, there
    return None if group is None or len(keys) == 1 else _under_other_name(keys, stored, asked, group)


def _under_other_name(
    keys: list[str], stored: Collection[str], asked: set[str], group: str
) -> tuple[str, str] | None:
    inner = [key.removeprefix(group) for key in keys]
    for name in stored:
        if name.endswith(inner[0]) and name.count(".") == keys[0].count(".") and name not in asked:
            other = name.removesuffix(inner[0])
            if all(other + one in stored for one in inner):
                return keys[0], name
    return None


def _most_alike(key: str, stored: Iterable[str]) -> str:
    """The stored key that ends with most of the names in ``key``; of several, the one that begins like it."""
    steps = key.split(".")

    def likeness(other: str) -> tuple[int, int]:
        others = other.split(".")
        return _count_same(steps[::-1], others[::-1]), _count_same(steps, others)

    return max(stored, key=likeness)


def _count_same(these: Sequence[str], those: Sequence[str]) -> int:
    count = 0
    for one, other in zip(these, those, strict=False):
        if one != other:
            break
        count += 1
    return count
