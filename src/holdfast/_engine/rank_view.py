"""The checkpoint as one rank sees it, if values are kept in it that differed between the saving ranks."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from holdfast._contents.nested_state import Path
from holdfast._format.description import Directory
from holdfast._human_units import some_of
from holdfast._plan.flatten import Structure, containers_of, flat_key, paths_of
from holdfast._plan.metadata_entries import MetadataEntries, unchanged_entries
from holdfast._plan.read_columns import stored_keys_of
from holdfast._storage.item_places import ItemPlaces, StorageData, places_of
from holdfast._tensors.chunks import is_sharded
from holdfast._traverse import get_element
from holdfast._user_warning import warn_user
from holdfast.metadata import STORAGE_TYPES, Metadata, TensorStorageMetadata
from holdfast.per_rank import KEPT, RankKey, kept_key
from holdfast.planner import LoadPlan


@dataclass
class OwnTensorMetadata(TensorStorageMetadata):
    """A tensor of which the ranks had values of their own, which were no parts of a sharded one.

    Attributes:
        has_one_shape: Whether it had the same shape on all of them.
    """

    has_one_shape: bool = True


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
        own_shapes: For each key of a tensor of which ranks had values of their own, their shapes.
    """

    metadata: Metadata
    stored: Metadata
    shared: dict[str, int] = field(default_factory=dict)
    own_shapes: dict[str, set[torch.Size]] = field(default_factory=dict)
    _own: dict[str, str] = field(default_factory=dict)

    def mark_own(self) -> Metadata:
        """The metadata with entries of another class for tensors of which ranks had values of their own."""
        if not self.own_shapes:
            return self.metadata
        entries: dict[str, STORAGE_TYPES] = {**self.metadata.state_dict_metadata}
        for key, shapes in self.own_shapes.items():
            if isinstance(entry := entries.get(key), TensorStorageMetadata):
                about = entry.properties, entry.size, entry.chunks
                entries[key] = OwnTensorMetadata(*about, has_one_shape=shapes == {entry.size})
        return replace(self.metadata, state_dict_metadata=entries)

    def translate(self, plan: LoadPlan) -> LoadPlan:
        """A plan in the names of the storage."""
        if self.stored is self.metadata or not any(
            item.storage_index.fqn in self._own for item in plan.items
        ):
            return plan
        items = [
            replace(item, storage_index=replace(item.storage_index, fqn=self._own[key]))
            if (key := item.storage_index.fqn) in self._own
            else item
            for item in plan.items
        ]
        return replace(plan, items=items)

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
    saved_by = max(keys.values())
    why = f"{world_size} load" if saved_by != world_size else "they are loaded into sharded tensors"
    warn_user(
        f"each rank now has rank 0's value of {some_of(keys, 5)}: {saved_by} ranks saved different ones, and "
        f"{why}. Random states among them give the same numbers on every rank. PerRank(value, resize=rule) "
        "gives each rank its own."
    )


def view_of_rank(metadata: Metadata, *, rank: int, world_size: int, state: Mapping[Any, Any]) -> RankView:
    """The checkpoint as one rank sees it: the metadata itself if no value was kept for a single rank.

    Args:
        metadata: The metadata.
        rank: The rank that loads.
        world_size: How many ranks load.
        state: What it loads into. Values that were kept stay visible if it asks for them by their names.
    """
    every = metadata.state_dict_metadata
    kept = _KeptForRanks(metadata)
    if not kept.keys and not kept.containers:
        return RankView(metadata, metadata)
    here = kept.of(lambda told: (told.rank, told.world_size) == (rank, world_size))
    elsewhere = kept.of(lambda told: told.world_size != world_size)
    shared = {told.key: told.world_size for told in elsewhere.keys.values()}
    shared.update(dict.fromkeys(elsewhere.shadowed(), elsewhere.largest_world))
    own_shapes = kept.shapes()
    own = {told.key: key for key, told in here.keys.items()}
    for key, stored in list(own.items()):
        if key in every and is_sharded(get_element(state, here.path_of(key, stored))):
            shared[key] = world_size
            del own[key]
    asked = {key.partition(".")[0] for key in state if type(key) is str and key.startswith(KEPT)}
    hidden = {key for key in kept.keys if key.partition(".")[0] not in asked}
    hidden.update(key for key in here.shadowed() if key not in own)
    planner_data = here.seen_structure(own, hidden, asked)
    places, known = places_of(metadata), unchanged_entries(metadata)
    if known is not None and places is not None and places.directory is known.directory:
        numbers = known.directory.numbers
        visible = {key: numbers[own.get(key, key)] for key in [*numbers, *own] if key not in hidden}
        directory = Directory(known.columns, visible)
        seen = replace(
            metadata,
            state_dict_metadata=MetadataEntries(known.columns, directory=directory),
            planner_data=planner_data,
            storage_data=StorageData(ItemPlaces(places.manifest, directory)),
        )
        return RankView(seen, seen, shared, own_shapes)
    entries = {key: every[own.get(key, key)] for key in [*every, *own] if key not in hidden}
    seen = replace(metadata, state_dict_metadata=entries, planner_data=planner_data)
    return RankView(seen, metadata, shared, own_shapes, own)


class _KeptForRanks:
    """The values that a checkpoint keeps for single ranks.

    Attributes:
        keys: The stored keys, each taken apart.
        containers: The paths of containers that a rank had where the plain state has something else.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._every = metadata.state_dict_metadata
        self._planner_data = metadata.planner_data
        self._paths = paths_of(metadata.planner_data)
        found = {key: told for key in self._every if (told := kept_key(key)) is not None}
        # Of a planner that is not ours, a name without a value for all is a name like any other.
        is_ours = isinstance(metadata.planner_data, Structure)
        self.keys = {key: told for key, told in found.items() if is_ours or told.key in self._every}
        self.containers = {
            path: told
            for path in containers_of(metadata.planner_data)
            if (told := kept_key(flat_key(path))) is not None
        }

    @property
    def largest_world(self) -> int:
        """How many ranks saved; the largest number, if the checkpoint was put together from several."""
        told = [*self.keys.values(), *self.containers.values()]
        return max((one.world_size for one in told), default=0)

    def of(self, is_wanted: Callable[[RankKey], bool]) -> "_KeptForRanks":
        """Only the values of some ranks."""
        some = copy.copy(self)
        some.keys = {key: told for key, told in self.keys.items() if is_wanted(told)}
        some.containers = {path: told for path, told in self.containers.items() if is_wanted(told)}
        return some

    def path_of(self, key: str, stored: str) -> Path:
        """The way to the value of a key in the state of the rank that saved it under another name."""
        return self._paths[stored][1:] if stored in self._paths else (key,)

    def shapes(self) -> dict[str, set[torch.Size]]:
        """The shapes of the tensors under each key, also of the one for all."""
        found: dict[str, set[torch.Size]] = {}
        for stored, told in self.keys.items():
            for entry in (self._every[stored], self._every.get(told.key)):
                if isinstance(entry, TensorStorageMetadata):
                    found.setdefault(told.key, set()).add(entry.size)
        return found

    def shadowed(self) -> list[str]:
        """The keys of the plain state that lie where these ranks had a value in the place of a container, or
        a container in the place of a value or of another kind of container.
        """
        places = {path[1:] for path in self.containers}
        for stored, told in self.keys.items():
            if told.key not in self._every:
                places.add(self.path_of(told.key, stored))
        if not places:
            return []
        return [
            key for key, path in self._paths.items() if not key.startswith(KEPT) and _is_below(path, places)
        ]

    def seen_structure(self, own: Mapping[str, str], hidden: set[str], asked: set[str]) -> Any:
        """The planner data as these ranks see it.

        Args:
            own: Keys with the names that their values are stored under.
            hidden: Stored keys that they do not see.
            asked: First parts of kept names that they see.
        """
        if not isinstance(self._planner_data, dict):
            return self._planner_data
        seen = Structure((key, path) for key, path in self._paths.items() if key not in hidden)
        seen.update({key: self.path_of(key, stored) for key, stored in own.items() if stored in self._paths})
        places = {path[1:] for path in self.containers} | {seen[key] for key in own if key in seen}
        for path, container in containers_of(self._planner_data).items():
            is_plain = not path or not str(path[0]).startswith(KEPT)
            if (is_plain and not _is_below(path, places)) or (path and str(path[0]) in asked):
                seen.containers[path] = container
            elif path in self.containers:
                seen.containers[path[1:]] = container
        return seen


def _is_below(path: Path, places: set[Path]) -> bool:
    """Whether a path leads to one of the places, or into one."""
    return any(path[:depth] in places for depth in range(1, len(path) + 1))
