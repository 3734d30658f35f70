"""What one rank sees of a checkpoint that keeps values which differed between the ranks that saved."""

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast._engine.saved_by_rank import find
from holdfast._format.description import Directory
from holdfast._plan.flatten import Structure, containers_of
from holdfast._plan.metadata_entries import MetadataEntries
from holdfast._plan.read_columns import stored_keys_of
from holdfast._storage.item_places import ItemPlaces, StorageData, places_of
from holdfast._tensors.chunks import is_sharded
from holdfast.metadata import Metadata, MetadataIndex
from holdfast.per_rank import KEPT, kept_key, kept_name
from holdfast.planner import LoadPlan

_MOST_NAMED = 10


@dataclass
class RankView:
    """The checkpoint as one rank loads it.

    Attributes:
        metadata: For the planner: each key once, and under it what this rank saved, if there is such a value.
        stored: For the storage: the same, or the metadata as it was read, if that is not ours to change.
            Then ``translate`` gives plans the names of the storage.
        shared: The keys of which the ranks that saved had values of their own, while this rank gets the one
            that is for all: because another number of ranks loads, or because the state has a sharded tensor
            there, which would be put together from several. Each with the number of ranks that saved.
    """

    metadata: Metadata
    stored: Metadata
    shared: dict[str, int] = field(default_factory=dict)
    _own: dict[str, str] = field(default_factory=dict)

    def translate(self, plan: LoadPlan) -> LoadPlan:
        """A plan in the names of the storage."""
        if self.stored is self.metadata or not any(
            item.storage_index.fqn in self._own for item in plan.items
        ):
            return plan
        items = [
            dataclasses.replace(item, storage_index=_named(item.storage_index, self._own[key]))
            if (key := item.storage_index.fqn) in self._own
            else item
            for item in plan.items
        ]
        return dataclasses.replace(plan, items=items)

    def shared_by(self, plan: LoadPlan) -> dict[str, int]:
        """Those of the ``shared`` keys that a plan reads, in the order of the plan."""
        if not self.shared:
            return {}
        read = dict.fromkeys(stored_keys_of(plan))
        return {key: self.shared[key] for key in read if key in self.shared}


def warn_of_shared(ranks: Sequence[Mapping[str, int]], world_size: int) -> None:
    """On the coordinator: say once for all ranks which keys have one value for all now.

    Args:
        ranks: For each rank what ``shared_by`` gave.
        world_size: How many ranks load.
    """
    keys = {key: count for of_rank in ranks for key, count in of_rank.items()}
    if not keys:
        return
    named = [*keys][:_MOST_NAMED]
    if len(keys) > len(named):
        named.append(f"and {len(keys) - len(named)} more")
    warnings.warn(
        f"{max(keys.values())} ranks saved a value each under the keys {', '.join(named)}, and every rank "
        "gets that of the rank that coordinated the save. A rank gets its own only if as many ranks load as "
        f"saved (now {world_size}), and into a value that is not sharded. Save PerRank(value), and load it "
        "with a rule (resize=), if another number of ranks needs other values.",
        stacklevel=2,
    )


def _named(index: MetadataIndex, key: str) -> MetadataIndex:
    return MetadataIndex(key, index.offset, index.index)


def view_of_rank(metadata: Metadata, *, rank: int, world_size: int, state: Mapping[Any, Any]) -> RankView:
    """What a rank sees of a checkpoint: the metadata itself where no value was kept for a rank.

    Args:
        metadata: The metadata.
        rank: The rank that loads.
        world_size: How many ranks load.
        state: What it loads into. Values that were kept stay visible if it asks for them by their names.
    """
    every = metadata.state_dict_metadata
    kept = {key: told for key in every if key.startswith(KEPT) and (told := kept_key(key)) is not None}
    # Without the value for all, nobody can have kept others beside it.
    kept = {key: told for key, told in kept.items() if told.key in every}
    if not kept:
        return RankView(metadata, metadata)
    asked = {key.partition(".")[0] for key in state if type(key) is str and key.startswith(KEPT)}
    hidden = {key for key, told in kept.items() if kept_name(told.rank, told.world_size) not in asked}
    own = {told.key: key for key, told in kept.items() if (told.rank, told.world_size) == (rank, world_size)}
    shared = {told.key: told.world_size for told in kept.values() if told.world_size != world_size}
    for key in [key for key in own if is_sharded(_find(state, key, metadata.planner_data))]:
        shared[key] = world_size
        del own[key]
    planner_data = _without(metadata.planner_data, hidden)
    places = places_of(metadata)
    if (
        isinstance(every, MetadataEntries)
        and not every.is_open
        and places
        and places.directory is every.directory
    ):
        numbers = every.directory.numbers
        visible = {key: numbers[own.get(key, key)] for key in numbers if key not in hidden}
        directory = Directory(every.columns, visible)
        seen = dataclasses.replace(
            metadata,
            state_dict_metadata=MetadataEntries(every.columns, directory=directory),
            planner_data=planner_data,
            storage_data=StorageData(ItemPlaces(places.manifest, directory)),
        )
        return RankView(seen, seen, shared)
    entries = {key: every[own.get(key, key)] for key in every if key not in hidden}
    seen = dataclasses.replace(metadata, state_dict_metadata=entries, planner_data=planner_data)
    return RankView(seen, metadata, shared, own)


def _find(state: Mapping[Any, Any], key: str, planner_data: Any) -> Any:
    paths = planner_data if isinstance(planner_data, dict) else {}
    return find(state, paths.get(key, (key,)))


def _without(planner_data: Any, hidden: Iterable[str]) -> Any:
    if not isinstance(planner_data, dict):
        return planner_data
    left = Structure(planner_data)
    left.containers = containers_of(planner_data)
    for key in hidden:
        left.pop(key, None)
    return left
