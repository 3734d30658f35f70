"""Files of ``torch.save`` as a storage: the reader that loads from them."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from holdfast._io.page_cache import PageCache, check_page_cache
from holdfast._io.places import open_file_place
from holdfast._known_methods import known_to_engine
from holdfast._storage.store_reader import StoreReader
from holdfast._storage.store_writer import DEFAULT_BUDGET
from holdfast._storage.torch_save_reading import read_torch_save_metadata
from holdfast._storage.torch_save_source import TorchSaveSource
from holdfast.errors import CheckpointError, UsageError
from holdfast.metadata import Metadata

__all__ = ["TorchSaveReader"]


class TorchSaveReader(StoreReader):
    """Reads a file that ``torch.save`` wrote as if it were a checkpoint: only what is asked for, by ranges.

    Nothing that the file names is run. Tensors are read at their places in the file, whatever their strides;
    tensors that share memory there are each read on their own. Other values are kept, if they are of allowed
    types; of others the load of their key raises, and the rest can be loaded. The file must hold a dict.

    Files that torch before 1.6 wrote are refused, as are those of machines with another byte order.

    Args:
        path: The file: a path or a URL. None if it is given to ``load``.
        thread_count: How many threads read.
        memory_budget: As in ``FileSystemReader``.
        verify: As in ``FileSystemReader``. The file has a checksum for each storage, so that one is checked
            when all of it is read.
        allow_pickle: Import and run what the file names. Only for files that you would also run as a program.
        safe_globals: Classes and functions that values may need besides the usual ones.
        share_reads: As in ``FileSystemReader``.
        page_cache: As in ``FileSystemReader``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        thread_count: int | None = None,
        memory_budget: int = DEFAULT_BUDGET,
        verify: bool = True,
        allow_pickle: bool = False,
        safe_globals: Sequence[Callable[..., Any] | type] = (),
        share_reads: bool = True,
        page_cache: PageCache = "auto",
    ) -> None:
        self.page_cache: PageCache = check_page_cache(page_cache)
        self.safe_globals = tuple(safe_globals)
        StoreReader.__init__(
            self,
            None,
            thread_count=thread_count,
            memory_budget=memory_budget,
            verify=verify,
            allow_pickle=allow_pickle,
            share_reads=share_reads,
        )
        if path is not None:
            self._move_to(path)

    def _move_to(self, checkpoint_id: str | os.PathLike[str]) -> None:
        store, name = open_file_place(checkpoint_id, follow=True, page_cache=self.page_cache)
        self._store = TorchSaveSource(
            store,
            name,
            safe_globals=self.safe_globals,
            allow_pickle=self.allow_pickle,
            verify=self.verify,
        )

    @property
    def checkpoint_id(self) -> str:
        """The file."""
        return self._source.path

    @property
    def _source(self) -> TorchSaveSource:
        if self._store is None:
            raise UsageError("no file was named: pass its path to the reader, or as checkpoint_id")
        assert isinstance(self._store, TorchSaveSource)
        return self._store

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a file that exists."""
        try:
            store, name = open_file_place(checkpoint_id, follow=True)
            return store.exists(name)
        except CheckpointError:
            return False

    @known_to_engine
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """What the file holds; reads its directory and its pickle, and runs nothing of it.

        Raises:
            CheckpointNotFoundError: There is no such file.
            MetadataFormatError: It is not a file that ``torch.save`` writes, or does not hold a dict.
            IntegrityError: It is damaged.
            UnsafeMetadataError: What it holds, as a whole, needs something that is not allowed.
        """
        return self._as_asked_for(read_torch_save_metadata(self._source))
