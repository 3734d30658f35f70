"""Which storage serves a place, when the caller names only the place; and which planner, if none is given."""

import os
from typing import Literal, TypeAlias

from holdfast._io.page_cache import PageCache
from holdfast._io.places import open_place
from holdfast._torch_compat.torch_plugins import is_reader_of_torch, is_writer_of_torch
from holdfast.default_planner import DefaultSavePlanner
from holdfast.errors import UsageError
from holdfast.filesystem import FileSystemReader, FileSystemWriter
from holdfast.planner import SavePlanner
from holdfast.storage import StorageReader, StorageWriter

Place: TypeAlias = str | os.PathLike[str]


def choose_writer(
    writer: StorageWriter | None,
    checkpoint_id: Place | None,
    *,
    overwrite: bool | None = None,
    page_cache: PageCache | None = None,
) -> StorageWriter:
    """The caller's writer at the caller's place, or a new one that suits the place.

    Raises:
        UsageError: There is no place; or there is a writer, and an option that only it can be given.
    """
    if writer is None:
        place = _place(checkpoint_id, "storage_writer")
        writer = FileSystemWriter(place, overwrite=overwrite is not False, page_cache=page_cache or "auto")
        checkpoint_id = None  # it is there already
    else:
        _refuse_options(writer, "save", overwrite=overwrite, page_cache=page_cache)
    # torch resets a storage only to another place: one that was made for torch may forget its own.
    if checkpoint_id is not None or not is_writer_of_torch(writer):
        writer.reset(checkpoint_id)
    return writer


def choose_save_planner(
    planner: SavePlanner | None, *, check_replicas: bool | Literal["full", "raise"] | None
) -> SavePlanner:
    """The caller's planner, or a new one.

    Raises:
        UsageError: There is a planner, and an option that only it can be given.
    """
    if planner is None:
        return DefaultSavePlanner(check_replicas=True if check_replicas is None else check_replicas)
    _refuse_options(planner, "save", check_replicas=check_replicas)
    return planner


def _refuse_options(plugin: object, call: str, **options: object) -> None:
    """Raise if an option was given that only the caller's own storage or planner can be given."""
    kind = type(plugin).__name__
    for name, value in options.items():
        if value is not None:
            raise UsageError(
                f"give {name}={value!r} to the {kind} that you pass, not to {call}: {kind}({name}={value!r})"
            )


def choose_reader(
    reader: StorageReader | None, checkpoint_id: Place | None, *, page_cache: PageCache | None = None
) -> StorageReader:
    """The caller's reader at the caller's place, or a new one that suits the place.

    Raises:
        UsageError: There is no place; or there is a reader, and an option that only it can be given.
    """
    if reader is None:
        place = _place(checkpoint_id, "storage_reader")
        return FileSystemReader(place, page_cache="auto" if page_cache is None else page_cache)
    _refuse_options(reader, "load", page_cache=page_cache)
    if checkpoint_id is not None or not is_reader_of_torch(reader):
        reader.reset(checkpoint_id)
    return reader


def _place(checkpoint_id: Place | None, instead: str) -> str:
    if checkpoint_id is None or checkpoint_id == "":
        raise UsageError(
            f"where is the checkpoint? checkpoint_id must be specified, and is {checkpoint_id!r}: pass the "
            f'path of a folder, checkpoint_id="checkpoints/100", or a {instead} that knows its place',
            found=checkpoint_id,
        )
    if not isinstance(checkpoint_id, str | os.PathLike):
        raise UsageError(
            f"checkpoint_id must be the path of a folder, not {checkpoint_id!r} of type "
            f"{type(checkpoint_id).__name__}",
            found=checkpoint_id,
        )
    try:
        return open_place(checkpoint_id).url
    except UsageError as error:
        raise UsageError(f"{error} ({instead}=)", path=str(checkpoint_id)) from error
