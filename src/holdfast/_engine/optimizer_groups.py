"""The groups of an optimizer, as a checkpoint has them, brought into the order that an optimizer has now."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from holdfast._model_state.saved_groups import SavedGroups
from holdfast.errors import PlanError

Groups = Sequence[dict[str, Any]]


def assign_groups(
    saved: Groups,
    own: Groups,
    names: Callable[[], Sequence[str]],
    *,
    has_own_names: bool,
    allow_partial: bool,
    key: str,
) -> tuple[list[dict[str, Any]], dict[int, int | None]]:
    """The groups to give to the optimizer, and the new numbers of parameters that were saved under others.

    The new number is None if the optimizer does not have the parameter any more.

    Parameters are matched by name if the checkpoint and the optimizer have names, else by their positions.

    Args:
        saved: The groups that were loaded, with parameters by name or by number.
        own: The groups of the optimizer now, with parameters by number.
        names: Returns the names of the optimizer's parameters by number; an empty string if one is not known.
        has_own_names: Whether the optimizer itself keeps these names.
        allow_partial: Whether there may be more parameters now than were saved.
        key: The name of the optimizer in the state, for messages.

    Raises:
        PlanError: The parameters are matched by position, and the groups have other sizes.
    """
    members = [list(group.get("params", ())) for group in saved]
    saved_names = [name for group in saved for name in group.get("param_names", ())]
    numbers: dict[int, int | None] = {}
    if any(isinstance(name, str) for name in chain.from_iterable(members)):
        groups = _matched_by_name(own, saved, members, names())
    elif has_own_names and len(saved_names) == sum(map(len, members)) and saved_names != list(names()):
        number_of = {name: number for number, name in enumerate(names())}
        ordered = chain.from_iterable(members)
        numbers = {old: number_of.get(name) for old, name in zip(ordered, saved_names, strict=True)}
        groups = _matched_by_name(own, saved, [group["param_names"] for group in saved], names())
    else:
        check_sizes(members, own, allow_partial=allow_partial, key=key)
        pairs = zip(chain.from_iterable(members), _positions(members, own), strict=True)
        numbers = {old: new for old, new in pairs if old != new}
        groups = [{**group, **(saved[n] if n < len(saved) else {})} for n, group in enumerate(own)]
    for group, now in zip(groups, own, strict=True):
        group["params"] = now["params"]
        group.pop("param_names", None)
        if "param_names" in now:
            group["param_names"] = now["param_names"]
    return groups, numbers


def _matched_by_name(
    own: Groups, saved: Groups, members: Sequence[Sequence[Any]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """The groups of the optimizer with the options of the saved groups that had their parameters."""
    found = SavedGroups()
    for group, held in zip(saved, members, strict=True):
        found.add(group, held)
    taken = found.take_options(own, [[names[number] for number in group["params"]] for group in own])
    return [{**group, **options} for group, options in zip(own, taken, strict=True)]


def listed_groups(groups: Any) -> list[Any]:
    """The groups of a state dict, which are a list, or a dict as TrainingState has it."""
    return list(
        groups.values() if isinstance(groups, Mapping) else groups if isinstance(groups, list) else ()
    )


def check_sizes(
    members: list[list[Any]], own: Groups, *, allow_partial: bool, key: str, is_early: bool = False
) -> None:
    """Make sure that parameters can be matched by their positions in their groups.

    Args:
        members: The parameters of each group that was saved.
        own: The groups of the optimizer.
        allow_partial: Whether there may be more parameters now than were saved.
        key: The name of the optimizer in the state, for messages.
        is_early: Whether nothing has been read yet.

    Raises:
        PlanError: The groups have other sizes.
    """
    then, now = [len(group) for group in members], [len(group["params"]) for group in own]
    has_grown = len(then) <= len(now) and all(a <= b for a, b in zip(then, now, strict=False))
    if then == now or (allow_partial and has_grown):
        return
    raise PlanError(
        f"{key}: the checkpoint has {_sizes(then)}, the optimizer {_sizes(now)}, and they have no names to "
        "be matched by. "
        + ("Pass allow_partial_load=True to keep what was added as it is. " if has_grown else "")
        + "Save with get_optimizer_state_dict or TrainingState, which name the parameters. "
        + ("Nothing was changed." if is_early else "The optimizer is unchanged; other tensors are loaded."),
        key=key,
        expected=tuple(now),
        found=tuple(then),
    )


def _sizes(sizes: list[int]) -> str:
    groups = "1 group" if len(sizes) == 1 else f"{len(sizes)} groups"
    return f"{groups} of {', '.join(map(str, sizes))} parameters"


def _positions(members: list[list[Any]], own: Groups) -> list[int]:
    """For each saved parameter the number of the one that has its position in its group now."""
    return [
        group["params"][place]
        for held, group in zip(members, own, strict=False)
        for place in range(len(held))
    ]
