"""The values of a default planner, taken from its flat state instead of asking the planner for each.

That is right only while nobody has overridden the methods that find values.
"""

from collections.abc import Mapping
from typing import Any


class HasOwnValues:
    """A planner whose methods look values up in its flat state.

    Attributes:
        resolvers: For each method that a storage calls, the methods of the planner that it goes through.
        state_dict: The flat state.
    """

    resolvers: Mapping[str, tuple[str, ...]]
    state_dict: dict[str, Any]


def finds_values_itself(planner: Any, method: str) -> bool:
    """Whether ``method`` only looks a value up in the planner's flat state: no subclass has overridden it."""
    if not isinstance(planner, HasOwnValues):
        return False
    owner = next(cls for cls in type(planner).__mro__ if "resolvers" in vars(cls))
    return not any(
        name in vars(planner) or getattr(type(planner), name) is not getattr(owner, name)
        for name in planner.resolvers[method]
    )


def own_values(planner: Any, method: str) -> Mapping[str, Any] | None:
    """The flat state of a planner whose ``method`` only looks values up in it; None for other planners."""
    return planner.state_dict if finds_values_itself(planner, method) else None
