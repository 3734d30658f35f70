"""Checkpoints in a folder of a file system, under torch's names: the storage that is used by default."""

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast._file_system import FileSystem, FileSystemBase, open_file_system
from holdfast._format.item_table import StorageInfo
from holdfast._format.names import METADATA
from holdfast._io.page_cache import PageCache, check_page_cache
from holdfast._io.store import ByteStore
from holdfast._names_elsewhere import names_of
from holdfast._storage.item_streams import (
    DEFAULT_SUFFIX,
    SerializationFormat,
    StoragePrefix,
    StorageWriterTransforms,
    TensorLoader,
    item_size,
    split_by_size_and_type,
    write_item,
)
from holdfast._storage.metadata_writing import VERSION
from holdfast._storage.store_reader import StoreReader
from holdfast._storage.store_writer import DEFAULT_BUDGET, StoreWriter
from holdfast._user_warning import warn_user
from holdfast.extension import ExtensionRegistry, StreamTransformExtension
from holdfast.staging import BlockingAsyncStager
from holdfast.storage import WriteResult

__all__ = [
    "CURRENT_DCP_VERSION",
    "DEFAULT_SUFFIX",
    "FileSystem",
    "FileSystemBase",
    "FileSystemReader",
    "FileSystemWriter",
    "SerializationFormat",
    "WriteResult",
]

if not TYPE_CHECKING:
    __getattr__ = names_of(
        __name__, "_hf_utils", "metadata", "planner", "storage", "utils", "torch.distributed._shard._utils"
    )


CURRENT_DCP_VERSION = VERSION

# Programs that write the files of a checkpoint themselves know these by torch's names.
_metadata_fn = METADATA
_StorageInfo = StorageInfo
_StoragePrefix = StoragePrefix
_StorageWriterTransforms = StorageWriterTransforms
_TensorLoader = _SerialCpuLoader = _OverlappingCpuLoader = TensorLoader
_item_size = item_size
_split_by_size_and_type = split_by_size_and_type
_write_item = write_item


class _OfFileSystem:
    """A storage that is at ``path`` of the file system ``fs``.

    Subclasses may set both after ``__init__``, to a file system of their own: files are then written and read
    by its streams.
    """

    fs: FileSystemBase
    path: str | os.PathLike[str]
    page_cache: PageCache = "auto"
    _opened: "tuple[FileSystemBase, str | os.PathLike[str], ByteStore] | None" = None

    @property
    def store(self) -> ByteStore:
        """The folder. A relative path means the same one until the next ``reset``, also after a ``chdir``."""
        if self._opened is None or self._opened[0] != self.fs or self._opened[1] != self.path:
            self._opened = (
                self.fs,
                self.path,
                open_file_system(self.fs, self.path, page_cache=self.page_cache),
            )
        return self._opened[2]

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The folder."""
        return self.path

    def _move_to(self, checkpoint_id: str | os.PathLike[str]) -> None:
        self.path = self.fs.init_path(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save or load, at another folder if one is named."""
        super().reset(checkpoint_id)  # type: ignore[misc]
        self._opened = None
        _ = self.store  # now, in the working directory of the call


class FileSystemWriter(_OfFileSystem, StoreWriter, BlockingAsyncStager):
    """Writes a checkpoint into a folder.

    Until ``finish`` the folder's old checkpoint is there, whole; after it, the new one. Every save writes
    files of its own, so that it never touches another's. Files that then belong neither to the checkpoint nor
    to a save under way are removed.

    Args:
        path: The folder; made if it does not exist.
        single_file_per_rank: One file for each thread of a rank. False: a file for each item.
        sync_files: Wait until files are on stable storage. Without it a crash of the machine, not of the
            program, may lose the checkpoint.
        thread_count: How many threads write, each into a file of its own. One is enough for most disks.
        per_thread_copy_ahead: Accepted for compatibility; ``memory_budget`` bounds what is copied ahead.
        cache_staged_state_dict: Whether ``stage`` keeps its buffers. ``async_save`` does not use this.
        overwrite: Whether a checkpoint that is in the folder may be replaced.
        _extensions: Stream transforms that each item goes through; the first one stands next to the file.
        serialization_format: ``TORCH_SAVE``. With ``SAFETENSORS`` it warns, and writes the same, because what
            torch's writer makes of it can be loaded by no reader. For safetensors files use
            ``HuggingFaceStorageWriter``.
        torch_compatible: Write what stock torch needs to read the checkpoint, too.
        memory_budget: The most bytes of memory taken besides the state.
        page_cache: What large files leave in the page cache. ``"auto"``: everything, where the disk is slower
            than memory by a factor of two and memory has room, so that a restarted job loads from memory;
            nothing elsewhere. ``"keep"``: everything. ``"bypass"``: nothing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        *,
        torch_compatible: bool = True,
        memory_budget: int = DEFAULT_BUDGET,
        page_cache: PageCache = "auto",
    ) -> None:
        # By its value: torch's enumeration of this name will do as well.
        if serialization_format.value != SerializationFormat.TORCH_SAVE.value:
            warn_user(
                "FileSystemWriter writes checkpoints as TORCH_SAVE, which torch and Holdfast load, also "
                "if SAFETENSORS is asked for. Pass a HuggingFaceStorageWriter to save safetensors files.",
                UserWarning,
            )
        self.fs = FileSystem()
        self.path = self.fs.init_path(path)
        self.page_cache = check_page_cache(page_cache)
        StoreWriter.__init__(
            self,
            None,
            single_file_per_rank=single_file_per_rank,
            sync_files=sync_files,
            thread_count=thread_count,
            overwrite=overwrite,
            extensions=tuple(_extensions or ()),
            torch_compatible=torch_compatible,
            memory_budget=memory_budget,
        )
        BlockingAsyncStager.__init__(self, cache_staged_state_dict)
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.serialization_format = serialization_format


@dataclass(eq=False, repr=False)
class FileSystemReader(_OfFileSystem, StoreReader):
    """Reads a checkpoint from a folder, ours or torch's.

    Reads only the needed bytes. Checks every byte of Holdfast's checkpoints, and of torch's every tensor that
    is read whole. The folder needs to be readable, nothing more.

    Args:
        path: The folder.
        _extension_registry: Knows stream transforms besides the built-in ones.
        thread_count: How many threads read; 4 of a local folder by default.
        memory_budget: The most bytes of memory taken besides the state.
        verify: Compare checksums. False finds no damage.
        allow_pickle: Let planner data in the metadata be unpickled freely, running what code it holds.
        share_reads: Ask storage once for what several ranks need. Ranks of one machine find in its page cache
            what one of them has read; otherwise the rank that reads passes it on. False: each rank reads
            what it needs, whatever others do.
        page_cache: What large reads leave in the memory of the machine. ``"keep"``: what was read, so that
            the next load of the same checkpoint reads from memory. ``"bypass"``: nothing. ``"auto"``: as
            "keep", unless memory (of the machine and of the process's cgroup) has no room for twice as much,
            or the disk turns out to be faster than copying; then as "bypass".
    """

    path: str | os.PathLike[str]
    _extension_registry: ExtensionRegistry | None = None
    _: KW_ONLY
    page_cache: PageCache = "auto"
    # Those of the base that are no arguments here:
    _store: Any = field(init=False, default=None)
    registry: ExtensionRegistry = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_page_cache(self.page_cache)
        self.registry = self._extension_registry or ExtensionRegistry()
        self.fs = FileSystem()
        self.path = self.fs.init_path(self.path)


_FileSystemWriter = FileSystemWriter
