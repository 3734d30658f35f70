"""From the path that a user names to the checkpoint that is there."""

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from holdfast._contents.absence import explain_absence
from holdfast._contents.findings import Findings
from holdfast._contents.inventory import Inventory, read_inventory
from holdfast._format.metadata_file import LARGEST_METADATA
from holdfast._format.names import METADATA, metadata_rank, parse_data_file
from holdfast._format.safetensors import SUFFIX
from holdfast._format.safetensors_index import INDEX, LONE, find_index
from holdfast._io.blocks import BLOCK_SIZE
from holdfast._io.places import local_path, open_file_place, open_place, without_end_slashes
from holdfast._io.store import FileSource
from holdfast.errors import CheckpointNotFoundError


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

    store: FileSource
    metadata_names: list[tuple[int | None, str]]
    only_rank: int | None = None

    @property
    def url(self) -> str:
        """How the user would name it."""
        return self.store.url

    def sizes(self, *parts: Inventory) -> dict[str, int]:
        """The name and size of every file that is there; of those of the parts, if no others can be known."""
        return self.store.sizes(name for part in parts for name in part.files)

    def check_jobs(self, part: Inventory, report: Findings) -> Iterator[Callable[[], None]]:
        """Report what metadata and folder alone tell of a part, and make the jobs that read the rest."""
        # Only a verification needs it, and it takes a tenth of the time that `holdfast ls` may take.
        from holdfast._contents.checking_parts import part_jobs  # noqa: PLC0415

        return part_jobs(self.store, part, self.sizes(part), report)

    def parts(self) -> Iterator[Inventory]:
        """Read each metadata file. Raises what ``read_inventory`` and ``ByteStore.read`` do."""
        for rank, name in self.metadata_names:
            yield self.read(rank, name)

    def read(self, rank: int | None, name: str) -> Inventory:
        """Read one of the metadata files."""
        data = self.store.read(name, max_bytes=LARGEST_METADATA)
        return read_inventory(data, path=os.path.join(self.store.url, name), rank=rank)


@dataclass(frozen=True)
class SafetensorsModel(Checkpoint):
    """The safetensors files of a folder, or one of them.

    Attributes:
        only_file: The file, if the user named it alone.
    """

    only_file: str | None = None

    @property
    def url(self) -> str:
        return self.store.url if self.only_file is None else f"{self.store.url}/{self.only_file}"

    def read(self, rank: int | None, name: str) -> Inventory:
        # Only safetensors files need it.
        from holdfast._contents.safetensors_files import LARGEST_INDEX, read_model_chunks  # noqa: PLC0415
        from holdfast._contents.safetensors_manifest import entries_of_chunks  # noqa: PLC0415

        files, chunks = read_model_chunks(self.store, only=self.only_file)
        return Inventory(
            source="safetensors",
            path=f"{self.store.url}/{name}" if name else self.url,
            rank=rank,
            # The headers are read with the files: only an index is a file of its own.
            nbytes=len(self.store.read(name, max_bytes=LARGEST_INDEX)) if name == INDEX else 0,
            format="safetensors",
            block_size=BLOCK_SIZE if any(chunk.checksums for chunk in chunks) else None,
            entries=list(entries_of_chunks(chunks)),
            files=files,
        )


def find_checkpoint(path: str) -> Checkpoint:
    """The checkpoint at ``path``: a folder, or a file of it. Nothing is read yet.

    Raises:
        CheckpointNotFoundError: There is none.
    """
    path = local_path(path) or path
    found = None if os.path.isdir(path) else _named_by_a_file(path)
    return found or _in_folder(path)


def _named_by_a_file(path: str) -> Checkpoint | None:
    """The checkpoint that one of its files names; None if the path may be that of a folder."""
    above, name = os.path.split(path)
    rank = metadata_rank(name)
    if rank is not None or name == METADATA:
        return Checkpoint(_with_file(open_place(above or "."), name, path), [(rank, name)], rank)
    if name.endswith(SUFFIX):
        store, name = open_file_place(path)
        return SafetensorsModel(_with_file(store, name, path), [(None, "")], only_file=name)
    if find_index([name]):
        store = open_place(above or ".")
        names = store.known_names(name)
        if find_index(names) == name:  # it is the one that decides
            return _model_in(store, names)
    if parse_data_file(name):
        raise CheckpointNotFoundError(
            f"{path}: is a data file, which says nothing without the metadata of its checkpoint. Name the "
            f"folder that it is in: {above or '.'}",
            path=path,
        )
    if os.path.exists(path):
        raise CheckpointNotFoundError(f"{path}: is not a folder, and no file of a checkpoint", path=path)
    return None


def _with_file(store: FileSource, name: str, path: str) -> FileSource:
    """The store, which must have a file of that name."""
    if not store.exists(name):
        raise CheckpointNotFoundError(f"{path}: there is no such file", path=path)
    return store


def _in_folder(path: str) -> Checkpoint:
    store = open_place(without_end_slashes(path))
    names = store.known_names(METADATA, INDEX, LONE)
    if METADATA in names:
        return Checkpoint(store, [(None, METADATA)])
    ranks = sorted((rank, name) for name in names if (rank := metadata_rank(name)) is not None)
    if not ranks and (find_index(names) or any(name.endswith(SUFFIX) for name in names)):
        return _model_in(store, names)
    if not ranks:
        raise CheckpointNotFoundError(str(explain_absence(store, METADATA)), path=path)
    return Checkpoint(store, [*ranks])


def _model_in(store: FileSource, names: Collection[str]) -> SafetensorsModel:
    return SafetensorsModel(store, [(None, INDEX if INDEX in names else "")])
