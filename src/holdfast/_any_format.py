"""Finds the checkpoint at a path or URL, whatever its format."""

import os
from collections.abc import Callable, Iterable
from typing import Any

from holdfast._contents.opening import Checkpoint, find_checkpoint
from holdfast._format.names import METADATA, metadata_rank, parse_data_file
from holdfast._format.safetensors import SUFFIX
from holdfast._io.places import local_path, open_file_place, path_text
from holdfast.errors import CheckpointNotFoundError, UsageError

_TORCH_SAVE = (".pt", ".pth", ".bin", ".ckpt", ".tar")
"""How files of ``torch.save`` are usually called. A local file may be called anything."""

_BEGINNINGS = (b"PK\3\4", b"\x80\2")
"""How they begin: as zip archives, or, before torch 1.6, as pickles."""


def open_checkpoint(
    place: str | os.PathLike[str],
    *,
    verify: bool = True,
    allow_pickle: bool = False,
    safe_globals: Iterable[Callable[..., Any] | type] = (),
) -> Checkpoint:
    """The checkpoint at a path or URL: ours, torch's, safetensors, or a file of ``torch.save``.

    Only a file of ``torch.save`` needs torch, which is imported then, and its metadata is its pickle, to
    which the options apply.

    Raises:
        CheckpointNotFoundError: There is none.
        UsageError: It is no path, or no storage serves it.
    """
    path = path_text(place, "the checkpoint")
    if not _may_be_torch_save(path):
        try:
            return find_checkpoint(path)
        except CheckpointNotFoundError:
            # A URL does not tell whether it is one of a prefix or of a file, which may be called anything.
            if local_path(path) is not None or not _is_a_file(path):
                raise
    store, name = open_file_place(path, follow=True)
    if not store.exists(name):
        if local_path(path) is not None:
            raise CheckpointNotFoundError(f"{path}: there is no such file", path=path)
        return find_checkpoint(path)
    # It brings torch, which takes seconds.
    from holdfast._torch_save_checkpoint import open_torch_save  # noqa: PLC0415

    return open_torch_save(store, name, verify=verify, allow_pickle=allow_pickle, safe_globals=safe_globals)


def _is_a_file(url: str) -> bool:
    try:
        store, name = open_file_place(url)
    except UsageError:  # a bucket, without a name in it
        return False
    return not _is_of_a_checkpoint(name) and store.exists(name)


def _is_of_a_checkpoint(name: str) -> bool:
    is_metadata = name == METADATA or metadata_rank(name) is not None
    # The items of a data file are archives of torch.save, too, so it begins as one.
    return is_metadata or name.endswith(SUFFIX) or parse_data_file(name) is not None


def _may_be_torch_save(path: str) -> bool:
    folder = local_path(path)
    if folder is not None:
        path = folder
    name = os.path.basename(path)
    if _is_of_a_checkpoint(name):
        return False
    if folder is None or not os.path.isfile(path):
        return name.endswith(_TORCH_SAVE) and not os.path.isdir(path)
    with open(path, "rb") as file:
        return file.read(4).startswith(_BEGINNINGS) or name.endswith(_TORCH_SAVE)
