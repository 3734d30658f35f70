"""A storage of your own in 150 lines of code: raw bytes, one file for each item, one JSON file as the commit.

Holdfast's file storage does far more. This one shows what the contract asks of any storage: data goes to
new names, one atomic rename commits, any rank finds what another wrote, and every byte is checked on reading.
"""

import io
import json
import os
import uuid
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.futures import Future

from holdfast.errors import CheckpointNotFoundError, ChecksumError
from holdfast.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from holdfast.storage import StorageReader, StorageWriter, WriteResult

INDEX = "index.json"


@dataclass
class Place:
    """Where an item lies, and the checksum of its bytes."""

    key: str
    offset: list[int] | None
    file: str
    crc32: int


class FolderWriter(StorageWriter):
    """Writes each item into a file of its own in a folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Choose a new save id, so that this save's files have names that no other has."""
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)
        self.save_id = uuid.uuid4().hex[:12]

    def storage_meta(self) -> StorageMeta:
        """Say where and which save this is."""
        return StorageMeta(checkpoint_id=str(self.folder), save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing depends on the role."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank a prefix for its files."""
        return [replace(plan, storage_data=f"{rank}-{self.save_id}") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write each item, wait until the disk has it, and only then report it as written."""
        results = []
        for number, item in enumerate(plan.items):
            data = planner.resolve_data(item)
            raw = to_bytes(data) if isinstance(data, torch.Tensor) else data.read()
            name = f"{plan.storage_data}-{number}.bin"
            write_synced(self.folder / name, raw)
            offset = None if item.tensor_data is None else list(item.tensor_data.chunk.offsets)
            place = Place(item.index.fqn, offset, name, zlib.crc32(raw))
            results.append(WriteResult(item.index, len(raw), place))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: describe the whole checkpoint in one file, and put it in place by one rename."""
        entries = {
            key: None
            if isinstance(entry, BytesStorageMetadata)
            else {
                "dtype": str(entry.properties.dtype).removeprefix("torch."),
                "shape": list(entry.size),
                "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks],
            }
            for key, entry in metadata.state_dict_metadata.items()
        }
        places = [asdict(result.storage_data) for of_rank in results for result in of_rank]
        temporary = self.folder / f"{INDEX}-{self.save_id}"
        index = json.dumps({"entries": entries, "places": places}).encode()
        # The first line is the checksum of the second.
        write_synced(temporary, b"%d\n%b" % (zlib.crc32(index), index))
        temporary.replace(self.folder / INDEX)
        sync_folder(self.folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do, a URL will not."""
        return "://" not in os.fspath(checkpoint_id)


class FolderReader(StorageReader):
    """Reads what :class:`FolderWriter` wrote."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Go to another folder, if one is named."""
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Build the metadata from the JSON file."""
        try:
            crc32, index = (self.folder / INDEX).read_bytes().split(b"\n", 1)
        except FileNotFoundError as missing:
            message = f"no checkpoint in {self.folder}: it has no {INDEX}"
            raise CheckpointNotFoundError(message, path=str(self.folder)) from missing
        stored = json.loads(checked(index, int(crc32), self.folder / INDEX))
        entries = {
            key: BytesStorageMetadata() if entry is None else tensor_entry(entry)
            for key, entry in stored["entries"].items()
        }
        return Metadata(entries, storage_data=[Place(**place) for place in stored["places"]])

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Index the places by the names that plans use."""
        self.metadata = metadata
        self.places = {MetadataIndex(place.key, place.offset): place for place in metadata.storage_data}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each item's file and hand over the box that was asked for."""
        for item in plan.items:
            place = self.places[item.storage_index]
            path = self.folder / place.file
            raw = checked(path.read_bytes(), place.crc32, path)
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(raw))
                continue
            target = planner.resolve_tensor(item)
            target.copy_(self.box(item, bytearray(raw)))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def box(self, item: ReadItem, raw: bytearray) -> torch.Tensor:
        """The part of a stored chunk that ``item`` asks for; ``raw`` is the whole chunk."""
        entry = self.metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        chunk = next(c for c in entry.chunks if c.offsets == item.storage_index.offset)
        if not raw:
            return torch.empty(item.lengths, dtype=entry.properties.dtype)
        tensor = torch.frombuffer(raw, dtype=entry.properties.dtype).view(chunk.sizes)
        for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, offset, length)
        return tensor

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do, a URL will not."""
        return "://" not in os.fspath(checkpoint_id)


def tensor_entry(stored: dict[str, Any]) -> TensorStorageMetadata:
    """A tensor's metadata from its JSON form."""
    chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in stored["chunks"]
    ]
    properties = TensorProperties(getattr(torch, stored["dtype"]))
    return TensorStorageMetadata(properties, torch.Size(stored["shape"]), chunks)


def to_bytes(tensor: torch.Tensor) -> bytes:
    """The elements that ``tensor`` shows, in row-major order."""
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def checked(raw: bytes, crc32: int, path: Path) -> bytes:
    """Return ``raw`` if it has the checksum that it was written with."""
    if zlib.crc32(raw) != crc32:
        raise ChecksumError(f"{path} is damaged: its checksum is not the one that was stored", path=str(path))
    return raw


def write_synced(path: Path, raw: bytes) -> None:
    """Write a new file and wait until the disk has it."""
    with path.open("xb") as stream:
        stream.write(raw)
        # fsync sees only what has left Python's buffer.
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the folder's new names."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
