"""Looks at a checkpoint on disk and edits it, as a fault or somebody who knows the format would."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import holdfast as hf
from holdfast._format import metadata_file
from holdfast._format.description import column, ints
from holdfast._format.manifest import Manifest, decode, encode
from holdfast.errors import CheckpointException

METADATA = ".metadata"


def failure_of(action: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What ``action`` raises, if it is the error that saves and loads promise; others pass through.

    It is a CheckpointException and of the class of its cause, for which there is no type; or None.
    """
    try:
        action(*args, **options)
    except CheckpointException as error:
        return error
    return None


def contents(folder: str | Path) -> dict[str, bytes]:
    """Every file of a folder, byte for byte."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def put_back(folder: str | Path, files: dict[str, bytes]) -> None:
    """Make a folder hold exactly these files."""
    shutil.rmtree(folder, ignore_errors=True)
    Path(folder).mkdir(parents=True)
    for name, data in files.items():
        (Path(folder) / name).write_bytes(data)


def data_files(folder: str | Path) -> list[str]:
    """The names of the data files, sorted."""
    return sorted(name for name in os.listdir(folder) if name.endswith(".distcp"))


def data_file(folder: str | Path) -> Path:
    """The only data file of a checkpoint."""
    (name,) = data_files(folder)
    return Path(folder) / name


def flip_bit(path: str | Path, position: int, mask: int = 0x10) -> None:
    """Change a byte of a file, which keeps its size."""
    with Path(path).open("r+b") as file:
        file.seek(position)
        changed = file.read(1)[0] ^ mask
        file.seek(position)
        file.write(bytes([changed]))


def committed_files(folder: str | Path) -> set[str]:
    """The names that a folder may have after a save: what its metadata names, and that itself."""
    return {METADATA, *read_manifest(folder).file_names}


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of the checkpoint in a folder."""
    sections = metadata_file.split((Path(folder) / METADATA).read_bytes(), path="a test's checkpoint")
    assert sections.manifest is not None
    return decode(sections.manifest, path="a test's checkpoint")


def write_manifest(folder: str | Path, manifest: Manifest | bytes, torch_part: bytes | None = None) -> None:
    """Commit another manifest with valid checksums, as somebody who knows the format would."""
    path = Path(folder) / METADATA
    if torch_part is None:
        torch_part = bytes(metadata_file.split(path.read_bytes(), path="").pickle)
    encoded = manifest if isinstance(manifest, bytes) else encode(manifest)
    path.write_bytes(b"".join(metadata_file.join(torch_part, encoded)))


def changed_column(manifest: Manifest, name: str, typecode: Any, row: int, value: int) -> None:
    """Put another number into a column of a manifest."""
    numbers = list(ints(getattr(manifest, name), typecode))
    numbers[row] = value
    setattr(manifest, name, column(numbers, typecode))


def load(folder: str | Path, like: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Load a checkpoint into ``like``, and return it."""
    hf.load(like, storage_reader=hf.FileSystemReader(folder), **options)
    return like
