"""Whether a default planner is left as it is, so that its values can be used without asking for each."""

from collections.abc import Mapping
from typing import Any

__all__ = ["HasOwnValues", "finds_values_itself", "own_values"]


class HasOwnValues:
    """A planner that can show its flat state, unless a subclass has changed how values are found.

    ``resolvers`` names, for each method that the storage calls, the methods that it goes through.
    """

    resolvers: Mapping[str, tuple[str, ...]]
    state_dict: dict[str, Any]


def finds_values_itself(planner: Any, method: str) -> bool:
    """Whether ``method`` would only look a value up in the planner's flat state: nobody has changed it."""
    if not isinstance(planner, HasOwnValues):
        return False
    owner = next(cls for cls in type(planner).__mro__ if "resolvers" in vars(cls))
    return not any(
        name in vars(planner) or getattr(type(planner), name) is not getattr(owner, name)
        for name in planner.resolvers[method]
    )


def own_values(planner: Any, method: str) -> Mapping[str, Any] | None:
    """The values of a planner by flat key, if ``method`` would only look them up there; else None."""
    return planner.state_dict if finds_values_itself(planner, method) else None
