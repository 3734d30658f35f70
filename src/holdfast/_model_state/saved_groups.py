"""The groups of an optimizer as a state dict has them, found by the names of their parameters."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class SavedGroups:
    """Groups that were saved: the options of each, and which parameters were in it."""

    def __init__(self) -> None:
        self.place_of: dict[Any, int] = {}
        """For each parameter that was in any group, the number of its group."""
        self._options: list[Mapping[str, Any]] = []
        self._empty: list[int] = []

    def add(self, options: Mapping[str, Any], names: Sequence[Any]) -> None:
        """Add a group.

        Args:
            options: Its options.
            names: The parameters that were in it.
        """
        place = len(self._options)
        self._options.append(options)
        self.place_of.update(dict.fromkeys(names, place))
        if not names:
            self._empty.append(place)

    def take_options(self, names: Iterable[Any], *, is_empty: bool) -> Mapping[str, Any]:
        """The options for a group of an optimizer; none if no saved group fits.

        They are those of the group in which the first of its parameters was saved. An empty group has no
        parameters to be found by: it gets the options of the next saved group that was empty.

        Args:
            names: The parameters of the group. Those that were not saved do not matter.
            is_empty: Whether the group has no parameters at all.
        """
        if is_empty:
            place = self._empty.pop(0) if self._empty else None
        else:
            place = next((self.place_of[name] for name in names if name in self.place_of), None)
        return {} if place is None else self._options[place]
