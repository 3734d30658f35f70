"""Owns reading a checkpoint from a ByteStore: its metadata, and all that a plan asks for."""

import contextlib
import sys
from collections.abc import Callable

from holdfast._collector import paused_collector
from holdfast._contents.absence import explain_absence
from holdfast._contents.box_reader import box_jobs
from holdfast._contents.box_target import StoredBox
from holdfast._contents.item_bytes import ItemBytes
from holdfast._contents.open_files import OpenFiles, StoredFile
from holdfast._format.item_table import StorageInfo
from holdfast._format.metadata_file import LARGEST_METADATA
from holdfast._format.names import METADATA, metadata_name, metadata_rank
from holdfast._geometry import Box, row_major_strides
from holdfast._human_units import some_of
from holdfast._io import pool
from holdfast._io.pool import Budget, Cancellation
from holdfast._io.progress import ProgressTracker
from holdfast._io.store import FileSource
from holdfast._storage.destinations import Destination, PlannerCalls, ReadContext
from holdfast._storage.joined_ranges import join_neighbours
from holdfast._storage.metadata_reading import load_metadata
from holdfast._storage.object_reads import object_jobs
from holdfast._storage.own_parts import join_parts
from holdfast._storage.read_requests import FileRequest, chunk_of, sort_by_file
from holdfast._storage.small_reads import SmallTensors, is_small, small_tensor_jobs
from holdfast.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    ReplacedCheckpointError,
    TruncatedFileError,
)
from holdfast.extension import ExtensionRegistry
from holdfast.metadata import Metadata
from holdfast.planner import LoadItemType, LoadPlan, LoadPlanner

_REMEDY = (
    "The metadata names it: it was deleted, was not copied with the rest, or another save has replaced the "
    "checkpoint since the load began. Put it back, or load another checkpoint."
)
_REPLACED = "Another save has replaced the checkpoint since the load began. Load again."


def read_metadata_file(store: FileSource, *, rank: int | None = None, allow_pickle: bool = False) -> Metadata:
    """The metadata of the checkpoint in a store.

    Raises:
        CheckpointNotFoundError: There is no metadata. ``found`` tells of data files that are there.
        WrongFolderError: There is nothing of a checkpoint, and there are checkpoints in folders below.
        IntegrityError: There is some, and it is damaged or unsafe.
    """
    name = metadata_name(rank)
    try:
        data = store.read(name, max_bytes=LARGEST_METADATA)
    except CheckpointNotFoundError as error:
        raise explain_absence(store, name) from error
    return load_metadata(data, path=f"{store.url}/{name}", allow_pickle=allow_pickle)


def read_own_parts(
    store: FileSource, *, rank: int, world_size: int | None, allow_pickle: bool = False
) -> Metadata:
    """The metadata of a checkpoint that ranks wrote each for itself, as a rank sees it.

    Args:
        store: The checkpoint.
        rank: The rank that asks.
        world_size: How many ranks load; None for just the part of this rank, whoever else there is.
        allow_pickle: As for ``read_metadata_file``.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint, not even one part.
        WrongFolderError: The same, and there are checkpoints in folders below.
        IncompleteCheckpointError: Parts of it are missing.
        PlanError: Other ranks load than have saved, and the parts do not agree.
    """
    if world_size is None:
        return read_metadata_file(store, rank=rank, allow_pickle=allow_pickle)
    names = store.known_names(metadata_name(rank))
    if names and not store.can_list:
        names = store.known_names(*map(metadata_name, range(world_size)))
    numbers = sorted(found for name in names if (found := metadata_rank(name)) is not None)
    parts = {number: read_metadata_file(store, rank=number, allow_pickle=allow_pickle) for number in numbers}
    if not parts:
        raise explain_absence(store, METADATA)
    return join_parts(parts, rank=rank, world_size=world_size, path=store.url)


def read_items(
    store: FileSource,
    plan: LoadPlan,
    planner: LoadPlanner,
    metadata: Metadata,
    *,
    registry: ExtensionRegistry,
    threads: int,
    budget: int,
    verify: bool,
    progress: ProgressTracker,
    may_change: Callable[[str], bool] = lambda _: True,
) -> None:
    """Read every item of a plan and give it to the planner.

    Before the first one is given, every file is known to be there, and to be long enough.
    Objects come before tensors, so that one that is refused is found before a tensor is overwritten.

    Args:
        store: The checkpoint.
        plan: What to read.
        planner: Gets it.
        metadata: The checkpoint's metadata.
        registry: Makes transforms from their descriptors.
        threads: How many threads read.
        budget: The most bytes of scratch memory.
        verify: Whether checksums are compared.
        progress: Told of the bytes that are read.
        may_change: Whether an error is to call the value of a key changed; see ``LoadContext``.

    Raises:
        IncompleteCheckpointError: A file that the metadata names is missing; a ReplacedCheckpointError if the
            metadata is that of another save by now.
        IntegrityError: A file is damaged.
    """
    cancellation = Cancellation()
    calls, scratch = PlannerCalls(planner), Budget(budget, cancellation)
    context = ReadContext(store, registry, cancellation, scratch, verify, calls=calls)
    files = OpenFiles(store, most=threads, progress=progress)
    try:
        with paused_collector():
            requests = sort_by_file(plan, planner, metadata)
        _check_sizes(store, requests, metadata)
        store.expect(sum(request.nbytes for request in requests.values()))
        for kind in (_object_jobs, _tensor_jobs):
            jobs: list[Callable[[], None]] = []
            with paused_collector():
                for name, request in requests.items():
                    jobs += kind(context, StoredFile(files, name), request, metadata)
            pool.run(jobs, threads=threads, cancellation=cancellation)
    except CheckpointNotFoundError as error:
        # A file that was there a moment ago.
        gone = _missing_file(store, metadata, str(error), key=error.key, path=error.path)
        if isinstance(gone, ReplacedCheckpointError):
            gone.may_have_changed = bool(calls.touched)
        _say_what_changed(gone, calls.touched, may_change)
        raise gone from error
    except BaseException as error:
        _say_what_changed(error, calls.touched, may_change)
        raise
    finally:
        files.close()


def _missing_file(
    store: FileSource, metadata: Metadata, problem: str, *, key: str | None, path: str | None
) -> IncompleteCheckpointError:
    """The error for a file that the metadata names and that is not there."""
    if _is_replaced(store, metadata):
        return ReplacedCheckpointError(f"{problem} {_REPLACED}", key=key, path=path)
    return IncompleteCheckpointError(f"{problem} {_REMEDY}", key=key, path=path)


def _is_replaced(store: FileSource, metadata: Metadata) -> bool:
    """Whether the store has the metadata of another save now; False if that cannot be found out."""
    old = metadata.storage_meta and metadata.storage_meta.save_id
    try:
        found = read_metadata_file(store).storage_meta if old else None
    except Exception:  # noqa: BLE001 - the missing file is what the caller must see
        return False
    return found is not None and found.save_id not in {None, old}


def sizes_of_files(store: FileSource) -> dict[str, int]:
    """The size of every file, if the store tells them all at once. If not, each file must be asked for."""
    if store.traits.lists_sizes:
        with contextlib.suppress(AccessDeniedError):
            return store.list()
    return {}


def _check_sizes(store: FileSource, requests: dict[str, FileRequest], metadata: Metadata) -> None:
    """Raise unless every file is there, and as long as what is needed of it."""
    sizes = sizes_of_files(store)
    for name, request in requests.items():
        (key, end), path = request.last, f"{store.url}/{name}"
        size = sizes.get(name)
        if size is None:
            try:
                # Something else than a file, or a name that must not be used, has an error of its own.
                with store.open(name) as file:
                    size = file.nbytes
            except CheckpointNotFoundError as error:
                more = f" and {len(request) - 1} more" if len(request) > 1 else ""
                problem = f"{key}{more}: {name} of the checkpoint {store.url} is missing."
                raise _missing_file(store, metadata, problem, key=key, path=path) from error
        if end > size:
            raise TruncatedFileError(
                f"{key}: {path} has {size} bytes, expected at least {end}. "
                "Restore the file, or load another checkpoint.",
                key=key,
                path=path,
                expected=end,
                found=size,
            )


def _object_jobs(
    context: ReadContext, file: StoredFile, request: FileRequest, _: Metadata
) -> list[Callable[[], None]]:
    return object_jobs(
        context, file, [line for line in request.lines if line[1].type == LoadItemType.BYTE_IO]
    )


def _tensor_jobs(
    context: ReadContext, file: StoredFile, request: FileRequest, metadata: Metadata
) -> list[Callable[[], None]]:
    jobs: list[Callable[[], None]] = []
    small: list[tuple[StorageInfo, Destination]] = []
    for info, item in request.lines:
        if item.type == LoadItemType.BYTE_IO:
            continue
        shape, dtype = chunk_of(item.storage_index, metadata)
        target = Destination(context.calls, item, dtype)
        if is_small(info, shape, item):
            small.append((info, target))
        else:
            box = Box(tuple(item.storage_offsets), target.lengths)
            stored = StoredBox(info, shape, row_major_strides(shape), str(dtype)[6:], box, target)
            jobs += box_jobs(ItemBytes(context, file, info), stored)
    groups = [request.small] if request.small else []
    groups.append(SmallTensors.of_lines(small))
    small_jobs = (job for group in groups for job in small_tensor_jobs(context, file, group))
    return [*small_jobs, *join_neighbours(jobs, file)]


def _say_what_changed(error: BaseException, touched: list[str], may_change: Callable[[str], bool]) -> None:
    keys = sorted(filter(may_change, set(touched)))
    if not keys:
        note = "nothing was changed here by this load"
    else:
        count = "1 value" if len(keys) == 1 else f"{len(keys)} values"
        note = f"the load had begun, and may have changed {count}: {some_of(keys, 10)}"
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
