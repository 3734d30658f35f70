"""The values of PerRanks in a checkpoint, and why they may not fit the ranks that load."""

from dataclasses import dataclass, field
from typing import Any

from holdfast._contents.nested_state import Path
from holdfast._plan.flatten import containers_of, flat_key, paths_of
from holdfast.metadata import Metadata
from holdfast.per_rank import PerRank, rank_key


@dataclass
class SavedByRank:
    """The values that a checkpoint has at the place of a PerRank.

    Attributes:
        world_sizes: How many ranks saved; several numbers if the checkpoint was put together by hand.
        ranks: Those of which it has a value.
        path: The way to the place.
    """

    world_sizes: set[int] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    path: Path = ()

    def why_not_resized(self, owner: "PerRank[Any]", world_size: int) -> str | None:
        """Why the values cannot become those of ``world_size`` ranks; None if they can."""
        if len(self.world_sizes) > 1:
            sizes = " and ".join(map(str, sorted(self.world_sizes)))
            return f"the checkpoint has values that {sizes} ranks saved; it was put together from several"
        (count,) = self.world_sizes
        if owner.resize is None:
            return (
                f"{count} ranks saved a value each, and now there are {world_size}. Say how one becomes "
                "the other: PerRank(value, resize=function), where function(values, rank, world_size) gets "
                f"the {count} values and returns this rank's"
            )
        if len(self.ranks) < count:
            missing = next(rank for rank in range(count) if rank not in self.ranks)
            return (
                f"the rule needs the values of all {count} ranks that saved, and the checkpoint has only "
                f"{len(self.ranks)} of them: that of rank {missing} is not there"
            )
        return None


def has_value(key: str, metadata: Metadata) -> bool:
    """Whether a checkpoint has something at a place: a value, or the values of a container."""
    below = f"{key}."
    keys = metadata.state_dict_metadata
    return key in keys or any(there.startswith(below) for there in keys)


def saved_places(metadata: Metadata) -> dict[str, SavedByRank]:
    """The places at which ranks saved values of their own, by flat key."""
    places: dict[str, SavedByRank] = {}
    paths = paths_of(metadata.planner_data)

    def note(key: str, path: Path) -> None:
        told = rank_key(key)
        if told is None:
            return
        saved = places.setdefault(told.key, SavedByRank())
        saved.world_sizes.add(told.world_size)
        saved.ranks.add(told.rank)
        names = [step for step in path if rank_key(str(step)) is not None]
        saved.path = path[: path.index(names[0])] if names else (told.key,)

    for key in metadata.state_dict_metadata:
        if "@rank-" in key:
            note(key, paths.get(key, ()))
    # The value of a rank may be an empty dict, which has no key.
    for path in containers_of(paths):
        note(flat_key(path), path)
    return places
