"""Reads a checkpoint as ours do, by the metadata that a stranger's ``read_metadata`` returns."""

from collections.abc import Mapping
from typing import Any

from holdfast._format.item_table import StorageInfo
from holdfast._storage.item_places import places_of
from holdfast._torch_compat.torch_records import in_plain_types, to_ours
from holdfast.filesystem import FileSystemReader
from holdfast.metadata import Metadata, MetadataIndex


class ReaderWithOwnMetadata(FileSystemReader):
    """Stands for a reader of torch's whose ``read_metadata`` somebody has overridden.

    It may return metadata that it has kept, hide keys or give them other names. Bytes are checked as always.
    """

    stranger: Any = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The stranger's metadata, with our records of the items that it names."""
        theirs: Metadata = to_ours(self.stranger.read_metadata(*args, **kwargs))
        ours = super().read_metadata(*args, **kwargs)
        places = places_of(ours)
        # By the places: looking at the dict itself would give up its columns, which make loads fast.
        records = dict(ours.storage_data.items() if places is None else places.items())
        if not (theirs.state_dict_metadata == ours.state_dict_metadata and records == theirs.storage_data):
            ours.state_dict_metadata = theirs.state_dict_metadata
            ours.storage_data = _with_records_of(records, theirs.storage_data)
            if theirs.planner_data != in_plain_types(ours.planner_data):
                ours.planner_data = theirs.planner_data
        return ours


def _with_records_of(
    records: Mapping[MetadataIndex, StorageInfo], places: Mapping[MetadataIndex, Any]
) -> dict[MetadataIndex, StorageInfo]:
    """The record of the item at each of the places; it has the checksums."""
    known = {(record.relative_path, record.offset): record for record in records.values()}
    return {
        index: known.get((place.relative_path, place.offset))
        or StorageInfo(
            place.relative_path, place.offset, place.length, getattr(place, "transform_descriptors", None)
        )
        for index, place in places.items()
    }
