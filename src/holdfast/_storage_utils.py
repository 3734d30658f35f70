"""Which storage serves a place, under torch's name."""

import os
from typing import TYPE_CHECKING

from holdfast._names_elsewhere import names_of
from holdfast._storage_choice import choose_reader, choose_writer
from holdfast.storage import StorageReader, StorageWriter

if not TYPE_CHECKING:
    __getattr__ = names_of(__name__, "filesystem")


def _storage_setup(
    storage: StorageReader | StorageWriter | None,
    checkpoint_id: str | os.PathLike[str] | None,
    reader: bool = False,
) -> StorageReader | StorageWriter:
    """The given storage, at ``checkpoint_id`` if that is given; or a new one that suits the place.

    Raises:
        UsageError: There is neither a storage nor a place.
    """
    choose = choose_reader if reader else choose_writer
    return choose(storage, checkpoint_id)  # type: ignore[arg-type] # whoever asks for a reader gives one
