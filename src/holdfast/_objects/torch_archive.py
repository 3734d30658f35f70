"""The container that torch.save makes, opened without believing it: records are stored, never compressed."""

import io
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import torch

from holdfast.errors import IntegrityError


def _open(stream: io.BytesIO) -> zipfile.ZipFile:
    """The container, whose records are compared with their checksums when they are read, if it has any."""
    archive = zipfile.ZipFile(stream)
    infos = archive.infolist()
    # torch can be told to write none. Then that of the pickle is 0, too.
    if not any(info.CRC for info in infos if info.filename.endswith("/data.pkl")):
        for info in infos:
            info.CRC = None  # type: ignore[assignment] # Python compares nothing then
    return archive


def pickle_record(stream: io.BytesIO) -> bytes | None:
    """The pickle in the container, or None if this is not the container that torch.save makes today."""
    stream.seek(0)
    if not zipfile.is_zipfile(stream):
        stream.seek(0)
        return None
    with _open(stream) as archive:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return _read(archive, names[0]) if len(names) == 1 else None


def read_storages(stream: io.BytesIO) -> Callable[[str], bytearray]:
    """Gives the bytes of a storage of the container by its key."""

    def read(key: str) -> bytearray:
        stream.seek(0)
        with _open(stream) as archive:
            names = [name for name in archive.namelist() if name.endswith(f"/data/{key}")]
            if len(names) != 1:
                raise IntegrityError(f"the container has no storage {key!r}")
            return bytearray(_read(archive, names[0]))

    return read


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    _refuse(archive.getinfo(name))
    return archive.read(name)


def check_records(stream: io.BytesIO) -> None:
    """Raise if torch must not read the container, or would not notice that it is damaged.

    Raises:
        IntegrityError: A record is compressed (a few bytes of it could be gigabytes), or is not what its
            checksum says.
    """
    stream.seek(0)
    if zipfile.is_zipfile(stream):
        with _open(stream) as archive:
            for info in archive.infolist():
                _refuse(info)
            if (damaged := archive.testzip()) is not None:
                raise IntegrityError(f"the record {damaged} is not what its checksum says")
    stream.seek(0)


def load_tensor(content: bytes, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Let torch read the tensor in a container, under its weights-only rules.

    Raises:
        IntegrityError: There is none, or another one.
    """
    stream = io.BytesIO(content)
    try:
        check_records(stream)
        tensor: Any = torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:
        raise IntegrityError(f"cannot be read: {error}") from error
    found = (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, torch.Tensor) else type(tensor)
    expected = (tuple(shape), dtype)
    if found != expected:
        what = f"is {found}, where its metadata says {expected}"
        raise IntegrityError(what, expected=expected, found=found)
    loaded: torch.Tensor = tensor.detach()
    return loaded


def _refuse(info: zipfile.ZipInfo) -> None:
    if info.compress_type != zipfile.ZIP_STORED:
        raise IntegrityError(f"the record {info.filename} is compressed, which torch.save never does")
