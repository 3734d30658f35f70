"""From the path that a user names to the checkpoint that is there."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast._format.inventory import Inventory, read_inventory
from holdfast._format.metadata_file import FILE_NAME
from holdfast._io.local import LocalStore
from holdfast.errors import CheckpointNotFoundError

__all__ = ["DATA_FILE", "LEFTOVER", "RANK_METADATA", "Checkpoint", "find_checkpoint"]

DATA_FILE = re.compile(r"__(\d+)_(\d+)(?:-[0-9a-f]+)?\.distcp")
RANK_METADATA = re.compile(r"__(\d+)\.metadata")
LEFTOVER = re.compile(r"(?:__\d+)?\.metadata\..*tmp")
_LARGEST_METADATA = 16 << 30


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder and the metadata files that describe it.

    A folder with ``.metadata`` is one checkpoint. One with ``__0.metadata``, ``__1.metadata`` and so on was
    saved by ranks on their own: each of these has a part, and equal keys in two parts are different
    values. So parts are never merged.

    Attributes:
        store: The folder.
        metadata_names: The metadata files, each with its rank; None is the rank of ``.metadata``.
        only_rank: The rank, if the user named its metadata file alone.
    """

    store: LocalStore
    metadata_names: list[tuple[int | None, str]]
    only_rank: int | None = None

    def parts(self) -> Iterator[Inventory]:
        """Read each metadata file. Raises what ``read_inventory`` and ``ByteStore.read`` do."""
        for rank, name in self.metadata_names:
            yield self.read(rank, name)

    def read(self, rank: int | None, name: str) -> Inventory:
        """Read one of the metadata files."""
        data = self.store.read(name, max_bytes=_LARGEST_METADATA)
        return read_inventory(data, path=os.path.join(self.store.url, name), rank=rank)


def find_checkpoint(path: str) -> Checkpoint:
    """The checkpoint at ``path``, which is a folder or a metadata file in it. Nothing is read yet.

    Raises:
        CheckpointNotFoundError: There is none.
    """
    folder, name = os.path.split(path)
    part = RANK_METADATA.fullmatch(name)
    if (part or name == FILE_NAME) and not os.path.isdir(path):
        store = LocalStore(folder or ".")
        if name not in store.list():
            raise CheckpointNotFoundError(f"{path}: there is no such file", path=path)
        rank = int(part[1]) if part else None
        return Checkpoint(store, [(rank, name)], rank)
    if not os.path.isdir(path):
        what = (
            "is not a folder and not a .metadata file" if os.path.exists(path) else "there is no such folder"
        )
        raise CheckpointNotFoundError(f"{path}: {what}", path=path)
    store = LocalStore(path.rstrip("/") or "/")
    names = os.listdir(path)
    if FILE_NAME in names:
        return Checkpoint(store, [(None, FILE_NAME)])
    ranks = sorted((int(part[1]), name) for name in names if (part := RANK_METADATA.fullmatch(name)))
    if not ranks:
        raise CheckpointNotFoundError(_explain_absence(path, names), path=path)
    return Checkpoint(store, [*ranks])


def _explain_absence(path: str, names: list[str]) -> str:
    if not names:
        return f"{path}: the folder is empty"
    if any(DATA_FILE.fullmatch(name) for name in names):
        return f"{path}: has data files, but no {FILE_NAME}: the save did not complete"
    near = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
    return f"{path}: no checkpoint here; it has no {FILE_NAME} (it has {near})"
