"""Owns the errors for a place without metadata: they say what is there instead."""

import os

from holdfast._format.names import METADATA, describe_data_files, metadata_name, shows_a_checkpoint
from holdfast._format.safetensors import SUFFIX
from holdfast._human_units import some_of
from holdfast._io.store import FileSource
from holdfast.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError, WrongFolderError

_MOST_NAMED = 5


def explain_absence(store: FileSource, name: str) -> StorageError:
    """The error for a place that lacks its metadata file ``name``.

    Returns:
        A CheckpointNotFoundError, which programs take for their first start. If there is nothing of a
        checkpoint, but there are checkpoints in folders below, a WrongFolderError: the path is too short.
    """
    names = store.known_names()
    files = describe_data_files(names)
    if files is not None:
        text = (
            f"no complete checkpoint at {store.url}: it has {files}, but no {name}. Either the save did "
            f"not end, or {name} was removed: then put it back before you save here again."
        )
        return CheckpointNotFoundError(text, path=store.url, found=files)
    below, others = store.folders_with([METADATA, metadata_name(0)])
    if below and not any(map(shows_a_checkpoint, names)):
        one = f"{store.url.rstrip('/')}/{below[0]}"
        return WrongFolderError(
            f"no checkpoint at {store.url}: the checkpoints are in folders of it: "
            f"{some_of(below, _MOST_NAMED)} (newest first). Name one of them, such as {one}",
            path=store.url,
            found=list(below),
        )
    there = [*sorted(names), *(f"{folder}/" for folder in others)]
    if any(other.endswith(SUFFIX) for other in names):
        text = (
            f"no checkpoint at {store.url}: it has no {name}, but safetensors files. Read them with "
            f"storage_reader=HuggingFaceStorageReader({store.url!r}), or look into them with holdfast.open"
        )
    elif there:
        text = f"no checkpoint at {store.url}: it has no {name} (it has {some_of(there, _MOST_NAMED)})"
    else:
        what = "the folder is empty" if os.path.isdir(store.url) else "there is no such folder"
        text = f"no checkpoint at {store.url}: {'nothing is there' if '://' in store.url else what}"
        if "://" not in store.url and not os.path.isabs(store.url):
            text += f" (the working directory is {os.getcwd()})"
        if store.url.startswith("~"):
            text += ". A ~ in a path is not replaced by your home folder: use os.path.expanduser"
    return CheckpointNotFoundError(text, path=store.url)


def refuse_folder_of_run(store: FileSource) -> None:
    """Raise if a place has no checkpoint, but folders with checkpoints: one beside these would hide them.

    Raises:
        CheckpointExistsError: It has such folders.
    """
    absence = explain_absence(store, METADATA)
    if isinstance(absence, WrongFolderError):
        raise CheckpointExistsError(
            f"{store.url}: has checkpoints in folders of it: {some_of(absence.found, _MOST_NAMED)}. Name a "
            f"folder for the new one, such as {store.url.rstrip('/')}/NAME",
            path=store.url,
        )
