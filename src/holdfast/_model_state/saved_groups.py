"""The groups of an optimizer as a state dict has them, found by the names of their parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast._user_warning import warn_user


class SavedGroups:
    """Groups that were saved: the options of each, and which parameters were in it."""

    def __init__(self) -> None:
        self.place_of: dict[Any, int] = {}
        """For each parameter that was in any group, the number of its group."""
        self.options: list[Mapping[str, Any]] = []
        """The options of each group."""
        self._empty: list[int] = []

    def add(self, options: Mapping[str, Any], names: Sequence[Any]) -> None:
        """Add a group.

        Args:
            options: Its options.
            names: The parameters that were in it.
        """
        place = len(self.options)
        if place and options.keys() == self.options[-1].keys() and not _unlike([options, self.options[-1]]):
            # The flattened form has a group for each parameter, and their options take more than its states.
            options = self.options[-1]
        self.options.append(options)
        self.place_of.update(dict.fromkeys(names, place))
        if not names:
            self._empty.append(place)

    def take_options(
        self, own: Sequence[Mapping[str, Any]], names: Sequence[Sequence[Any]]
    ) -> list[dict[str, Any]]:
        """The options for the groups of an optimizer; none for a group of which nothing was saved.

        A group gets the options of the group in which its parameters were saved. If parameters of one saved
        group are in several groups now, or the other way round, an option stays as the optimizer has it where
        there is no one value for it, and a warning says so. An empty group has no parameters to be found by:
        it gets the options of the next saved group that was empty.

        Args:
            own: The groups of the optimizer.
            names: The parameters of each of them. Those that were not saved do not matter.
        """
        places = [self._places(group, of_group) for group, of_group in zip(own, names, strict=True)]
        taken = [dict(self.options[found[0]]) if found else {} for found in places]
        sharing: dict[int, list[int]] = {}
        for number, found in enumerate(places):
            for place in found:
                sharing.setdefault(place, []).append(number)
        kept = [_unlike([self.options[place] for place in found]) for found in places]
        for numbers in sharing.values():
            unlike = _unlike([own[number] for number in numbers])
            for number in numbers:
                kept[number] |= unlike
        for number, options in enumerate(taken):
            kept[number] &= options.keys() & own[number].keys()
            taken[number] = {name: value for name, value in options.items() if name not in kept[number]}
        _warn_of_kept(own, kept)
        return taken

    def _places(self, group: Mapping[str, Any], names: Sequence[Any]) -> list[int]:
        """The saved groups that the parameters of a group were in."""
        if not group["params"]:
            return [self._empty.pop(0)] if self._empty else []
        return list(dict.fromkeys(self.place_of[name] for name in names if name in self.place_of))


def _unlike(groups: Sequence[Mapping[str, Any]]) -> set[str]:
    """The options that have not the same value in all groups that have them."""
    unlike: set[str] = set()
    for group in groups[1:]:
        for name in (group.keys() & groups[0].keys()) - {"params", "param_names"}:
            if not _is_same(group[name], groups[0][name]):
                unlike.add(name)
    return unlike


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        is_pair = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return one is other or (is_pair and one.shape == other.shape and bool((one == other).all()))
    return bool(one == other)


def _warn_of_kept(own: Sequence[Mapping[str, Any]], kept: Sequence[set[str]]) -> None:
    told = [
        f"group {number}: " + ", ".join(f"{name} {own[number][name]}" for name in sorted(names))
        for number, names in enumerate(kept)
        if names
    ]
    if told:
        warn_user(
            "the groups of the optimizer are not those of the checkpoint: parameters of one group are in "
            "several now, or those of several in one. Options that have no one value stay as the optimizer "
            f"has them ({'; '.join(told[:_MOST_NAMED])}). All others are the saved ones. If that is not what "
            "you want, make the groups that were saved, or set the options after the load.",
        )


_MOST_NAMED = 10
