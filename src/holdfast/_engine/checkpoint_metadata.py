"""The metadata that a load begins with: what ranks wrote together, or each for itself."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from holdfast._engine.ports import ReaderPort
from holdfast._format.item_table import StorageInfo
from holdfast._format.names import parse_data_file
from holdfast._ranks.exchange import Exchange
from holdfast._storage.item_places import places_of
from holdfast.errors import CheckpointNotFoundError, IncompleteCheckpointError, UsageError, describe_ranks
from holdfast.metadata import Metadata

logger = logging.getLogger(__name__)


def read_metadata(reader: ReaderPort, exchange: Exchange) -> tuple[Metadata, bool]:
    """The metadata as this rank may load it, and whether all ranks share it; called on every rank.

    Metadata that is there and cannot be read is an error: whatever else is in that place is older.

    Raises:
        CheckpointException: As a CheckpointNotFoundError if no rank finds anything, as an
            IncompleteCheckpointError if some find their parts; the same on every rank.
    """

    def read() -> Metadata | None:
        try:
            found = reader.read_metadata()
        except FileNotFoundError:
            if not reader.has_rank_metadata:
                raise
            return None
        if found.record is None:
            return found
        # Without its record: that of a save by 10,000 ranks is nearly a megabyte, which no load needs.
        sent = replace(found)
        sent.user_metadata = found.user_metadata
        return sent

    if reader.metadata_is_alike:
        shared = exchange.share("read metadata", read)
        all_have_it = shared is not None
    else:
        # A reader that we do not know may do more than read.
        own: list[Metadata | None] = []

        def have() -> bool:
            own.append(read())
            return own[0] is not None

        all_have_it = exchange.agree("read metadata", have, all)
        shared = own[0]
    mine = shared if all_have_it else _read_rank_metadata(shared, reader, exchange)
    assert mine is not None
    return mine, shared is not None


def _read_rank_metadata(shared: Metadata | None, reader: ReaderPort, exchange: Exchange) -> Metadata:
    """The metadata of this rank's own part; ``shared`` if this rank has found metadata of all ranks."""
    mine: list[Metadata] = []

    def read() -> CheckpointNotFoundError | None:
        try:
            mine.append(shared or reader.read_rank_metadata(exchange.rank, exchange.world_size))
        except CheckpointNotFoundError as error:
            return error
        except FileNotFoundError:
            # A stranger's reader has neither form, and knows best what is missing of the usual one.
            try:
                mine.append(reader.read_metadata())
            except FileNotFoundError as error:
                absence = CheckpointNotFoundError(str(error), path=error.filename)
                absence.__cause__ = error
                return absence
        return None

    exchange.agree("read metadata", read, _check_parts)
    return mine[0]


def _check_parts(absences: list[CheckpointNotFoundError | None]) -> None:
    """Raise unless every rank has found its part: whether there is nothing at all makes a difference."""
    missing = [rank for rank, absence in enumerate(absences) if absence is not None]
    if not missing:
        return
    absence = absences[missing[0]]
    assert absence is not None
    if len(missing) < len(absences):
        raise IncompleteCheckpointError(
            f"{describe_ranks(missing)} of {len(absences)} found no part of the checkpoint, the others did: "
            f"{absence}",
            path=absence.path,
            rank=missing[0],
        )
    if absence.found:
        # Programs take this error for their first start. It may be one.
        logger.warning("%s", absence)
    raise absence


def not_a_first_start(read: Callable[[], None]) -> Callable[[], None]:
    """Turn a FileNotFoundError of any storage into an IncompleteCheckpointError: there is metadata."""

    def read_what_is_there() -> None:
        try:
            read()
        except FileNotFoundError as error:
            raise IncompleteCheckpointError(
                f"the checkpoint is there, and a file of it is not: {error}", path=error.filename
            ) from error

    return read_what_is_there


def place_to_compare(stored: Metadata, place: str | None) -> str | None:
    """The place, if this rank could read data of another checkpoint than the metadata without an error.

    Our data files are named after their save. Those of torch, and most safetensors files, have the same names
    in every checkpoint.
    """
    if place is None:
        return None
    places, name = places_of(stored), None
    if places is None:
        records: Any = (stored.storage_data or {}).values()
        name = next((record.relative_path for record in records if isinstance(record, StorageInfo)), None)
    elif places.manifest.file_names:
        # Without a look at the records: that would make one for each of millions of items.
        name = places.manifest.file_names[0]
    file = parse_data_file(name) if name is not None else None
    return None if file is not None and file.save is not None else place


def check_places(places: Sequence[str | None]) -> None:
    """Raise if ranks read from different places: the metadata that they share is that of one place."""
    for rank, place in enumerate(places):
        if place != places[0] and place is not None and places[0] is not None:
            raise UsageError(
                f"all ranks must load from the same place, but rank 0 loads from {places[0]} and rank "
                f"{rank} from {place}. Choose the checkpoint on one rank and broadcast its name.",
                rank=rank,
                expected=places[0],
                found=place,
            )
