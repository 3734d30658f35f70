"""Writing a checkpoint into a ByteStore: all items of a plan, the commit, and the clean-up after it."""

import heapq
import io
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from holdfast._format.metadata_file import FILE_NAME
from holdfast._io import pool
from holdfast._io.pool import Cancellation
from holdfast._io.store import ByteStore
from holdfast._plan.merge import chunk_nbytes
from holdfast._storage.commit import dump_metadata, file_names
from holdfast._storage.item_writer import ItemWriter
from holdfast._storage.names import is_data_file, is_leftover, is_rank_metadata, shows_a_checkpoint
from holdfast._storage.reading import read_metadata_file
from holdfast.errors import CheckpointError, InvalidPlanError, StorageError
from holdfast.extension import StreamTransformExtension
from holdfast.metadata import Metadata
from holdfast.planner import SavePlan, SavePlanner, WriteItem
from holdfast.storage import WriteResult

__all__ = ["commit", "discard_uncommitted", "existing_checkpoint", "remove_unreferenced", "write_items"]

logger = logging.getLogger(__name__)

_FILE_BUFFERS = 32 * 1024 * 1024


def write_items(
    store: ByteStore,
    plan: SavePlan,
    planner: SavePlanner,
    *,
    name_file: Callable[[int], str],
    one_file: bool,
    threads: int,
    durable: bool,
    transforms: Sequence[StreamTransformExtension],
    budget: int,
) -> list[WriteResult]:
    """Write every item of a plan into new files; on return they are on stable storage, names included."""
    buckets = _deal(plan.items, threads) if one_file else [[item] for item in plan.items]
    cancellation = Cancellation()
    # A file being written holds a ring of buffers; what is not in the host's memory as it is stored takes
    # copies besides. With many threads and a small budget, fewer work at once.
    threads = max(1, min(threads, budget // (2 * _FILE_BUFFERS)))
    copy_at_once = max(1 << 20, min(_FILE_BUFFERS, budget // threads - _FILE_BUFFERS))

    finished: list[str] = []

    def job(number: int, items: list[WriteItem]) -> list[WriteResult]:
        name = name_file(number)
        hint = sum(map(chunk_nbytes, items)) + 1024 * len(items)
        with store.create(name, nbytes_hint=hint, durable=durable) as file:
            writer = ItemWriter(file, name, transforms, copy_at_once=copy_at_once)
            for item in items:
                cancellation.check()
                try:
                    _add(writer, item, planner)
                except OSError as error:
                    raise _naming(error, item.index.fqn) from error
            try:
                results = writer.finish()
            except OSError as error:
                # What was buffered left only now: any of the file's items may be the one that failed.
                keys = [item.index.fqn for item in items]
                raise _naming(error, " to ".join(dict.fromkeys([*keys[:1], *keys[-1:]]))) from error
        finished.append(name)
        return results

    jobs = [(lambda number=number, items=items: job(number, items)) for number, items in enumerate(buckets)]
    try:
        results = pool.run(jobs, threads=threads, cancellation=cancellation)
        if durable and results:
            store.sync()
    except BaseException:
        _delete_quietly(store, finished)
        raise
    return [result for of_file in results for result in of_file]


def _add(writer: ItemWriter, item: WriteItem, planner: SavePlanner) -> None:
    data: Any = planner.resolve_data(item)
    if not isinstance(data, torch.Tensor | io.BytesIO):
        raise InvalidPlanError(
            f"{item.index.fqn}: the planner gave a {type(data).__name__}, not a tensor or BytesIO",
            key=item.index.fqn,
        )
    writer.add(item, data)


def _naming(error: OSError, what: str) -> OSError:
    """The same error, saying what was being written: the system knows only the file."""
    if error.errno is None:
        return error
    return OSError(error.errno, f"{error.strerror} (while writing {what})", error.filename)


def _deal(items: list[WriteItem], count: int) -> list[list[WriteItem]]:
    """Items in ``count`` groups of about the same number of bytes; no group is empty unless all are."""
    count = max(1, min(count, len(items)))
    if count == 1:
        return [items]
    groups: list[list[WriteItem]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for item in sorted(items, key=chunk_nbytes, reverse=True):
        nbytes, number = heapq.heappop(heap)
        groups[number].append(item)
        heapq.heappush(heap, (nbytes + chunk_nbytes(item) + 1, number))
    return [group for group in groups if group]


def commit(
    store: ByteStore,
    metadata: Metadata,
    *,
    name: str = FILE_NAME,
    world_size: int,
    durable: bool,
    torch_compatible: bool,
) -> None:
    """Make the checkpoint exist: one atomic replace of its metadata file."""
    pieces = dump_metadata(metadata, world_size=world_size, torch_compatible=torch_compatible)
    store.replace(name, b"".join(pieces), durable=durable)


def existing_checkpoint(store: ByteStore) -> str | None:
    """The name of a file that shows that there is a checkpoint, of any form; None if there is none."""
    for name in sorted(store.list()):
        if shows_a_checkpoint(name):
            return name
    return None


def remove_unreferenced(store: ByteStore, metadata: Metadata, *, only_rank: int | None = None) -> None:
    """After a commit: remove data files that the checkpoint does not use, and leftovers of other saves.

    A failure is logged and not raised: the checkpoint is complete, and the files are only in the way.

    Args:
        store: The checkpoint's folder.
        metadata: What was committed.
        only_rank: For a checkpoint of one rank's own part, that rank: the others' files are not touched.
    """
    try:
        used = file_names(metadata)
        store.delete(
            name
            for name in store.list()
            if name not in used
            and (
                is_data_file(name, only_rank)
                or (only_rank is None and (is_rank_metadata(name) or is_leftover(name)))
            )
        )
    except (OSError, StorageError) as error:
        logger.warning("%s: files of an earlier save could not be removed: %s", store.url, error)


def discard_uncommitted(store: ByteStore, metadata: Metadata, *, rank: int | None) -> None:
    """After a commit that failed: remove the files of that save, unless it was committed after all.

    The step that failed may have been the last one, which makes the new name durable.
    """
    assert metadata.storage_meta is not None
    try:
        there = read_metadata_file(store, rank=rank).storage_meta
    except (CheckpointError, OSError):
        there = None
    if there is None or there.save_id != metadata.storage_meta.save_id:
        _delete_quietly(store, file_names(metadata))


def _delete_quietly(store: ByteStore, names: Iterable[str]) -> None:
    """Make room after a failure, which is already on its way to the caller."""
    try:
        store.delete(names)
    except (OSError, StorageError) as error:
        logger.warning("%s: files of a failed save could not be removed: %s", store.url, error)
