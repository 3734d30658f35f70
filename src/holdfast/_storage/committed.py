"""The metadata of a checkpoint that was just committed, for ranks that may never look at it."""

import functools
import os
from dataclasses import dataclass

from holdfast._deferred import DeferredDict
from holdfast._io.store import ByteStore
from holdfast._storage.metadata_writing import VERSION
from holdfast._storage.reading import read_metadata_file
from holdfast.errors import CheckpointNotFoundError
from holdfast.metadata import Metadata, StorageMeta


@dataclass(frozen=True)
class CommittedMetadata:
    """What is enough to find it again.

    Attributes:
        save_id: The save that made it.
        keys: How many keys it has.
        items: How many items.
        paths: How many entries of planner data.
    """

    save_id: str
    keys: int
    items: int
    paths: int

    @staticmethod
    def of(metadata: Metadata, save_id: str) -> "CommittedMetadata":
        """What the coordinator tells the others."""
        data = metadata.planner_data
        return CommittedMetadata(
            save_id,
            len(metadata.state_dict_metadata),
            len(metadata.storage_data),
            len(data) if isinstance(data, dict) else 0,
        )

    def as_metadata(self, store: ByteStore, checkpoint_id: str | os.PathLike[str]) -> Metadata:
        """The metadata; what it holds is read from the store on the first look.

        Looking raises CheckpointNotFoundError once another save has replaced the checkpoint.
        """

        @functools.cache
        def read() -> Metadata:
            found = read_metadata_file(store)
            if found.storage_meta is None or found.storage_meta.save_id != self.save_id:
                raise CheckpointNotFoundError(
                    f"{store.url}: the checkpoint that this metadata describes has been replaced by another",
                    path=store.url,
                )
            return found

        return Metadata(
            DeferredDict(self.keys, lambda: dict(read().state_dict_metadata).items()),
            DeferredDict(self.paths, lambda: dict(read().planner_data or {}).items()),
            DeferredDict(self.items, lambda: dict(read().storage_data).items()),
            StorageMeta(checkpoint_id, self.save_id),
            VERSION,
        )
