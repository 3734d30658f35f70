"""Checkpoints that ranks wrote each for itself: their parts, put together as far as that is possible."""

from collections.abc import Mapping
from typing import Any

from holdfast._format.item_table import StorageInfo
from holdfast._format.names import metadata_name
from holdfast._plan.flatten import Structure
from holdfast._storage.item_places import places_of
from holdfast.errors import IncompleteCheckpointError, MetadataFormatError, PlanError, describe_ranks
from holdfast.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata


def join_parts(parts: Mapping[int, Metadata], *, rank: int, world_size: int, path: str) -> Metadata:
    """What a rank can load of such a checkpoint.

    With as many ranks as have saved, each sees its own values, and the chunks of all ranks. With another
    number of ranks there is nobody whose own values they are, so that all parts must agree.

    Args:
        parts: The metadata of each part by the rank that wrote it.
        rank: The rank that loads.
        world_size: How many ranks load.
        path: The checkpoint, for messages.

    Raises:
        IncompleteCheckpointError: A part is missing.
        PlanError: The parts have different values under one key, and other ranks load than have saved.
        MetadataFormatError: They describe one tensor differently.
    """
    saved_by = _world_size(parts, rank, world_size)
    same_world = saved_by == world_size
    missing = sorted(set(range(saved_by)) - parts.keys())
    # A rank that has its own part may not see the others', which may be on other machines.
    if rank not in parts if same_world else missing:
        raise IncompleteCheckpointError(
            f"{path}: {saved_by} ranks wrote this checkpoint, each for itself, and {world_size} load it. The "
            f"parts of {describe_ranks(missing)} are missing: put back {metadata_name(missing[0])}, or "
            "load another checkpoint. If the save did not end, remove this one.",
            path=path,
        )
    joined = _Joined(path, saved_by)
    own_first = [rank, *(other for other in parts if other != rank)] if same_world else list(parts)
    for number in own_first:
        joined.add(parts[number], must_agree=not same_world)
    return joined.metadata


def _world_size(parts: Mapping[int, Metadata], rank: int, world_size: int) -> int:
    """How many ranks saved. torch does not record it: then as many as there are parts, as far as is seen."""
    recorded = [places.manifest.world_size for part in parts.values() if (places := places_of(part))]
    if not any(recorded) and set(parts) == {rank}:
        return world_size
    return max(*recorded, *parts, max(parts) + 1) if recorded else max(parts) + 1


class _Joined:
    def __init__(self, path: str, saved_by: int) -> None:
        self.path = path
        self.saved_by = saved_by
        self.places: dict[MetadataIndex, StorageInfo] = {}
        self.structure = Structure()
        self.metadata = Metadata({}, self.structure, self.places, StorageMeta())

    def add(self, part: Metadata, *, must_agree: bool) -> None:
        for key, entry in part.state_dict_metadata.items():
            known = self.metadata.state_dict_metadata.setdefault(key, entry)
            if known is not entry:
                self._check_alike(key, known, entry)
        for index, place in part.storage_data.items():
            known_place = self.places.setdefault(index, place)
            if known_place is place:
                self._add_chunk(part, index)
            elif must_agree and not _hold_the_same(known_place, place):
                raise PlanError(
                    f"{index.fqn}: {self.saved_by} ranks wrote {self.path}, each for itself, and they have "
                    f"different values here. Load it with {self.saved_by} ranks.",
                    key=index.fqn,
                    expected=self.saved_by,
                )
        if isinstance(part.planner_data, dict):
            if must_agree:
                self.structure.refuse_other_tensors(part.planner_data)
            self.structure.merge(part.planner_data)

    def _check_alike(self, key: str, known: Any, entry: Any) -> None:
        if type(known) is not type(entry) or (
            isinstance(entry, TensorStorageMetadata)
            and (known.size != entry.size or known.properties.dtype != entry.properties.dtype)
        ):
            raise MetadataFormatError(
                f"{key}: the parts that ranks wrote of {self.path} describe it differently", key=key
            )

    def _add_chunk(self, part: Metadata, index: MetadataIndex) -> None:
        known, entry = (m.state_dict_metadata[index.fqn] for m in (self.metadata, part))
        if known is entry or not isinstance(entry, TensorStorageMetadata):
            return
        assert isinstance(known, TensorStorageMetadata)
        known.chunks.append(next(chunk for chunk in entry.chunks if chunk.offsets == index.offset))


def _hold_the_same(one: StorageInfo, other: StorageInfo) -> bool:
    """Whether checksums show two items to hold the same bytes; of torch's there are none to show it."""
    return (
        one.is_checked
        and one.payload_nbytes == other.payload_nbytes
        and one.checksums == other.checksums
        and one.transform_descriptors == other.transform_descriptors
    )
