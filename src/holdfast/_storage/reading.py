"""Reading a checkpoint from a ByteStore: its metadata, and all that a plan asks for."""

from collections.abc import Callable

from holdfast._format.names import METADATA, is_data_file, metadata_name, metadata_rank
from holdfast._io import pool
from holdfast._io.pool import Budget, Cancellation
from holdfast._io.progress import ProgressTracker
from holdfast._io.store import FileSource
from holdfast._storage.delivery import Counter
from holdfast._storage.metadata_reading import load_metadata
from holdfast._storage.object_reader import object_job
from holdfast._storage.open_files import SharedFile
from holdfast._storage.own_parts import join_parts
from holdfast._storage.packs import is_small, pack_jobs
from holdfast._storage.source import Chunk, ReadContext, Source
from holdfast._storage.tensor_reader import tensor_jobs
from holdfast._storage.wanted import Wanted, chunk_of, sort_by_file
from holdfast._storage.whole import whole_jobs
from holdfast.errors import CheckpointNotFoundError, TruncatedFileError
from holdfast.extension import ExtensionRegistry
from holdfast.metadata import Metadata
from holdfast.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

__all__ = ["read_items", "read_metadata_file", "read_own_parts"]

LARGEST_METADATA = 16 << 30


def read_metadata_file(store: FileSource, *, rank: int | None = None, allow_pickle: bool = False) -> Metadata:
    """The metadata of the checkpoint in a store.

    Raises:
        CheckpointNotFoundError: There is no complete checkpoint.
        IntegrityError: There is one, and its metadata is damaged or unsafe.
    """
    name = metadata_name(rank)
    try:
        data = store.read(name, max_bytes=LARGEST_METADATA)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(_explain_absence(store, name), path=store.url) from error
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
        CheckpointNotFoundError: There is no such checkpoint, or parts of it are missing.
        PlanError: Other ranks load than have saved, and the parts do not agree.
    """
    if world_size is None:
        return read_metadata_file(store, rank=rank, allow_pickle=allow_pickle)
    numbers = sorted(found for name in store.names() if (found := metadata_rank(name)) is not None)
    parts = {number: read_metadata_file(store, rank=number, allow_pickle=allow_pickle) for number in numbers}
    if not parts:
        raise CheckpointNotFoundError(_explain_absence(store, METADATA), path=store.url)
    return join_parts(parts, rank=rank, world_size=world_size, path=store.url)


def _explain_absence(store: FileSource, name: str) -> str:
    names = store.names()
    if not names:
        return f"no checkpoint at {store.url}: there is no such folder, or it is empty"
    if any(map(is_data_file, names)):
        return (
            f"no complete checkpoint at {store.url}: it has data files, but no {name}; the save did not end"
        )
    near = ", ".join(sorted(names)[:5])
    return f"no checkpoint at {store.url}: it has no {name} (it has {near})"


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
) -> None:
    """Read every item of a plan and hand it to the planner.

    Before the first one is handed over, every file is known to be there, and to be long enough.
    Objects come before tensors, so that one that is refused is found before a tensor is overwritten.
    ``progress`` is told of the bytes that were read from storage; an exception that it raises ends the load.
    """
    cancellation = Cancellation()
    counter = Counter(planner)
    context = ReadContext(counter, registry, Budget(budget, cancellation), cancellation, verify)
    files: list[SharedFile] = []
    try:
        wanted = sort_by_file(plan, planner, metadata)
        _check_sizes(store, wanted)
        for kind in (_object_jobs, _tensor_jobs):
            jobs: list[Callable[[], None]] = []
            for name, of_file in wanted.items():
                file = SharedFile(store, name, progress)
                files.append(file)
                jobs += [file.job(work) for work in kind(context, file, of_file, metadata)]
            pool.run(jobs, threads=threads, cancellation=cancellation)
    except BaseException as error:
        _say_what_changed(error, counter.touched)
        raise
    finally:
        for file in files:
            file.close()


def _check_sizes(store: FileSource, wanted: dict[str, Wanted]) -> None:
    """Raise unless every file is there, and as long as what is wanted of it needs."""
    sizes = store.list() if store.traits.lists_sizes else {}
    for name, of_file in wanted.items():
        key, path = of_file.first_key(), f"{store.url}/{name}"
        size = sizes.get(name)
        if size is None:
            try:
                # Something else than a file, or a name that must not be used, has an error of its own.
                with store.open(name) as file:
                    size = file.nbytes
            except CheckpointNotFoundError as error:
                raise CheckpointNotFoundError(
                    f"{key} and {len(of_file) - 1} more: {name} of the checkpoint {store.url} is missing",
                    key=key,
                    path=path,
                ) from error
        short = of_file.reaching_beyond(size)
        if short is not None:
            key, end = short
            raise TruncatedFileError(
                f"{key}: {path} has {size} bytes, expected at least {end}. "
                "Restore the file, or load another checkpoint.",
                key=key,
                path=path,
                expected=end,
                found=size,
            )


def _object_jobs(
    context: ReadContext, file: SharedFile, wanted: Wanted, _: Metadata
) -> list[Callable[[], None]]:
    return [
        object_job(Source(context, file, place), item)
        for place, item in wanted.lines
        if item.type == LoadItemType.BYTE_IO
    ]


def _tensor_jobs(
    context: ReadContext, file: SharedFile, wanted: Wanted, metadata: Metadata
) -> list[Callable[[], None]]:
    jobs: list[Callable[[], None]] = []
    small: list[tuple[Chunk, ReadItem]] = []
    for place, item in wanted.lines:
        if item.type == LoadItemType.BYTE_IO:
            continue
        chunk = chunk_of(place, item.storage_index, metadata)
        if is_small(chunk, item):
            small.append((chunk, item))
        else:
            jobs += tensor_jobs(Source(context, file, place), chunk, item)
    packs = [] if wanted.whole is None else whole_jobs(context, file, wanted.whole)
    return [*packs, *pack_jobs(context, file, small), *jobs]


def _say_what_changed(error: BaseException, touched: list[str]) -> None:
    keys = sorted(set(touched))
    if not keys:
        note = "nothing was changed by this load"
    else:
        more = f" and {len(keys) - 10} more" if len(keys) > 10 else ""
        note = f"the load had begun: {len(keys)} values are changed: {', '.join(keys[:10])}{more}"
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
