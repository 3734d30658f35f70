"""Owns writing what a source holds as one file of ``torch.save``: from front to back, in pieces."""

import logging
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from holdfast._conversion.entry_stream import EntryStream
from holdfast._conversion.selection import Entry
from holdfast._format.dtypes import DTYPES
from holdfast._format.names import SAVE_DIGITS, is_leftover
from holdfast._format.torch_save_zip import ArchiveLayout
from holdfast._io.blocks import crc32
from holdfast._io.file_access import FileWriter
from holdfast._io.lease import Lease, take_lease
from holdfast._io.places import local_path
from holdfast._io.progress import ProgressTracker
from holdfast._io.store import ByteStore
from holdfast._objects.decode import decode_object
from holdfast._objects.saved_pickle import LaterTensor, PickledState, pickle_state
from holdfast._plan.flatten import unflatten
from holdfast._storage.cleanup import delete_quietly
from holdfast._tensors.host import memory_of
from holdfast.errors import CheckpointExistsError, PlanError, StorageError

logger = logging.getLogger(__name__)

# What torch.save writes besides the pickle and the storages.
_BEFORE = {".format_version": b"1", ".storage_alignment": b"64", "byteorder": b"little"}
_AFTER = {"version": b"3\n"}
_FOLDER = "archive"
_UNFINISHED = re.compile(rf".*\.([0-9a-f]{{{SAVE_DIGITS}}})\.tmp")


class TorchSaveTarget:
    """One file of ``torch.save`` that is being written.

    Until it is complete and checked, the file that has its name stays as it is.

    Args:
        store: The place.
        name: The file.
        overwrite: Whether a file of that name may be replaced.
        allow_pickle: As for ``load``: values of the source are decoded.
        safe_globals: As for ``load``.
    """

    def __init__(
        self,
        store: ByteStore,
        name: str,
        *,
        overwrite: bool,
        allow_pickle: bool,
        safe_globals: Sequence[Callable[..., Any] | type],
    ) -> None:
        self._store = store
        self._name = name
        self._overwrite = overwrite
        self._decoding: dict[str, Any] = {"allow_pickle": allow_pickle, "safe_globals": tuple(safe_globals)}

    def write(
        self, stream: EntryStream, progress: ProgressTracker, check: Callable[[ByteStore, str], None]
    ) -> None:
        """Write what a stream gives.

        Args:
            stream: Gives it.
            progress: Is told of the bytes that are written.
            check: Checks a file, given by its place and name, before it takes its name if that can be.

        Raises:
            CheckpointExistsError: There is such a file, and it must not be replaced; or it is a folder.
            PlanError: A value cannot be written.
            UnsafeMetadataError: A value needs something that is not allowed.
        """
        self._refuse_existing()
        pickled = self._pickle(stream)
        self._store.make()
        save_id = uuid.uuid4().hex
        lease = take_lease(self._store, save_id, shared=True)
        try:
            lease.keep()
            self._remove_leftovers(lease)
            if self._store.traits.random_writes:
                self._write_and_rename(stream, pickled, progress, check, lease, save_id)
            else:
                writer = self._create_in_place(stream.selection.nbytes)
                _write_archive(writer, stream, pickled, progress)
                self._store.sync()
                check(self._store, self._name)
        finally:
            lease.release()

    def _write_and_rename(
        self,
        stream: EntryStream,
        pickled: PickledState,
        progress: ProgressTracker,
        check: Callable[[ByteStore, str], None],
        lease: Lease,
        save_id: str,
    ) -> None:
        temporary = f"{self._name}.{save_id[:SAVE_DIGITS]}.tmp"
        try:
            writer = self._store.create(temporary, nbytes_hint=stream.selection.nbytes)
            _write_archive(writer, stream, pickled, progress)
            check(self._store, temporary)
            lease.check()
            self._refuse_existing()
            self._store.rename(temporary, self._name)
            self._store.sync()
        except BaseException:
            delete_quietly(self._store, [temporary])
            raise

    def _create_in_place(self, nbytes: int) -> FileWriter:
        if self._store.traits.creates_at_once:
            return self._store.create_over(self._name, nbytes_hint=nbytes)
        if self._store.exists(self._name):
            raise StorageError(
                f"{self._store.url}/{self._name}: this storage cannot replace a file in one step. Remove it, "
                "or convert to another name.",
                path=f"{self._store.url}/{self._name}",
            )
        return self._store.create(self._name, nbytes_hint=nbytes)

    def _refuse_existing(self) -> None:
        folder = local_path(f"{self._store.url}/{self._name}")
        if folder is not None and os.path.isdir(folder):
            raise CheckpointExistsError(
                f"{folder} is a folder, and torch.save writes one file: name another path", path=folder
            )
        if not self._overwrite and self._store.exists(self._name):
            path = f"{self._store.url}/{self._name}"
            raise CheckpointExistsError(
                f"{path} exists already; overwrite=True, or --overwrite, replaces it", path=path
            )

    def _remove_leftovers(self, lease: Lease) -> None:
        """Remove what killed conversions have left."""
        if not self._store.can_list:
            return
        names = self._store.names()
        dead = {save[:SAVE_DIGITS] for save in lease.dead}
        doomed = [name for name in names if (match := _UNFINISHED.fullmatch(name)) and match[1] in dead]
        if not lease.others(names)[0]:
            # Files that have not got their names do not tell whose they are: only if nobody else writes.
            doomed += filter(is_leftover, names)
        if delete_quietly(self._store, doomed):
            lease.settle()

    def _pickle(self, stream: EntryStream) -> PickledState:
        selection = stream.selection
        leaves = {name: self._leaf(stream, entry) for name, entry in selection.entries.items()}
        state = unflatten(leaves, selection.structure, selection.structure.containers)
        return pickle_state(state)

    def _leaf(self, stream: EntryStream, entry: Entry) -> Any:
        if entry.dtype is None:
            return decode_object(entry.name, stream.source.read_object(entry.key), **self._decoding)
        if DTYPES[str(entry.dtype)[6:]].storage is None:
            raise PlanError(
                f"{entry.name}: torch.load cannot read tensors of {entry.dtype}. Cast it with dtype=, or "
                "leave it out with keys=.",
                key=entry.name,
            )
        return LaterTensor(entry.dtype, entry.shape, entry.requires_grad, _identity(stream, entry), entry)


def _identity(stream: EntryStream, entry: Entry) -> Any:
    """Equal for tensors that are the same bytes of a torch.save file: they stay one tensor."""
    if stream.source.format != "torch_save" or not entry.nbytes:
        return entry.name
    place = stream.source.first_item(entry.key)
    return place.relative_path, place.offset, place.length, entry.dtype


def _write_archive(
    writer: FileWriter, stream: EntryStream, pickled: PickledState, progress: ProgressTracker
) -> None:
    layout = ArchiveLayout()
    with writer as file:
        file.progress = progress

        def record(name: str, nbytes: int, content: Iterable[Any]) -> None:
            file.write(layout.header(f"{_FOLDER}/{name}", nbytes))
            checksum = 0
            for piece in content:
                checksum = crc32(piece, checksum)
                file.write(piece)
            file.write(layout.descriptor(checksum))

        record("data.pkl", len(pickled.pickled), [pickled.pickled])
        for name, content in _BEFORE.items():
            record(name, len(content), [content])
        for number, storage in enumerate(pickled.storages):
            if isinstance(storage, LaterTensor):
                record(f"data/{number}", storage.nbytes, _contents(stream, storage.origin))
            else:
                memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
                record(f"data/{number}", storage.nbytes(), [memory_of(memory)])
        for name, content in _AFTER.items():
            record(name, len(content), [content])
        file.write(layout.directory())


def _contents(stream: EntryStream, entry: Entry) -> Iterator[memoryview]:
    return map(memory_of, stream.pieces(entry, entry.box)) if entry.nbytes else iter(())
