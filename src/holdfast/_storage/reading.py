"""Reading a checkpoint from a ByteStore: its metadata, and all that a plan asks for."""

from collections.abc import Callable

from holdfast._format.metadata_file import FILE_NAME
from holdfast._io import pool
from holdfast._io.pool import Budget, Cancellation
from holdfast._io.store import ByteStore
from holdfast._storage.commit import load_metadata
from holdfast._storage.delivery import Counter
from holdfast._storage.names import is_data_file
from holdfast._storage.object_reader import object_job
from holdfast._storage.open_files import SharedFile
from holdfast._storage.packs import is_small, pack_jobs
from holdfast._storage.record import StorageInfo
from holdfast._storage.source import Chunk, ReadContext, Source
from holdfast._storage.tensor_reader import tensor_jobs
from holdfast.errors import (
    CheckpointNotFoundError,
    InvalidPlanError,
    MetadataFormatError,
    TruncatedFileError,
)
from holdfast.extension import ExtensionRegistry
from holdfast.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from holdfast.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

__all__ = ["read_items", "read_metadata_file"]

_LARGEST_METADATA = 16 << 30


def read_metadata_file(store: ByteStore, *, rank: int | None = None, allow_pickle: bool = False) -> Metadata:
    """The metadata of the checkpoint in a store.

    Raises:
        CheckpointNotFoundError: There is no complete checkpoint.
        IntegrityError: There is one, and its metadata is damaged or unsafe.
    """
    name = FILE_NAME if rank is None else f"__{rank}{FILE_NAME}"
    try:
        data = store.read(name, max_bytes=_LARGEST_METADATA)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(_explain_absence(store, name), path=store.url) from error
    metadata, _ = load_metadata(data, path=f"{store.url}/{name}", allow_pickle=allow_pickle)
    return metadata


def _explain_absence(store: ByteStore, name: str) -> str:
    names = store.list()
    if not names:
        return f"no checkpoint at {store.url}: there is no such folder, or it is empty"
    if any(map(is_data_file, names)):
        return (
            f"no complete checkpoint at {store.url}: it has data files, but no {name}; the save did not end"
        )
    near = ", ".join(sorted(names)[:5])
    return f"no checkpoint at {store.url}: it has no {name} (it has {near})"


def read_items(
    store: ByteStore,
    plan: LoadPlan,
    planner: LoadPlanner,
    metadata: Metadata,
    *,
    registry: ExtensionRegistry,
    threads: int,
    budget: int,
    verify: bool,
) -> None:
    """Read every item of a plan and hand it to the planner.

    Before the first one is handed over, every file is known to be there, and to be long enough.
    Objects come before tensors, so that one that is refused is found before a tensor is overwritten.
    """
    places: dict[MetadataIndex, StorageInfo] = metadata.storage_data
    cancellation = Cancellation()
    counter = Counter(planner)
    context = ReadContext(counter, registry, Budget(budget, cancellation), cancellation, verify)
    files: list[SharedFile] = []
    try:
        wanted = _by_file(store, plan, places)
        for kind in (_object_jobs, _tensor_jobs):
            jobs: list[Callable[[], None]] = []
            for name, of_file in wanted:
                file = SharedFile(store, name)
                files.append(file)
                jobs += [file.job(work) for work in kind(context, file, of_file, metadata)]
            pool.run(jobs, threads=threads, cancellation=cancellation)
    except BaseException as error:
        _say_what_changed(error, counter.touched)
        raise
    finally:
        for file in files:
            file.close()


def _by_file(
    store: ByteStore, plan: LoadPlan, places: dict[MetadataIndex, StorageInfo]
) -> list[tuple[str, list[tuple[StorageInfo, ReadItem]]]]:
    """What is wanted of each file, in the order of the file, once it is known that the file can have it."""
    wanted: dict[str, list[tuple[StorageInfo, ReadItem]]] = {}
    for item in plan.items:
        place = places.get(item.storage_index)
        if place is None:
            raise InvalidPlanError(
                f"{item.storage_index.fqn}: the checkpoint has no chunk at {item.storage_index.offset}",
                key=item.storage_index.fqn,
            )
        wanted.setdefault(place.relative_path, []).append((place, item))
    sizes = store.list()
    for name, of_file in wanted.items():
        of_file.sort(key=_offset)
        _check_size(store, name, of_file, sizes.get(name))
    return list(wanted.items())


def _offset(wanted: tuple[StorageInfo, ReadItem]) -> int:
    return wanted[0].offset


def _check_size(
    store: ByteStore, name: str, wanted: list[tuple[StorageInfo, ReadItem]], size: int | None
) -> None:
    key, path = wanted[0][1].dest_index.fqn, f"{store.url}/{name}"
    if size is None:
        try:
            # Something else than a file, or a name that must not be used, has an error of its own.
            store.open(name).close()
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(
                f"{key} and {len(wanted) - 1} more: {name} of the checkpoint {store.url} is missing",
                key=key,
                path=path,
            ) from error
        return
    for place, item in wanted:
        if place.offset + place.length > size:
            raise TruncatedFileError(
                f"{item.dest_index.fqn}: {path} has {size} bytes, expected at least "
                f"{place.offset + place.length}. Restore the file, or load another checkpoint.",
                key=item.dest_index.fqn,
                path=path,
                expected=place.offset + place.length,
                found=size,
            )


def _object_jobs(
    context: ReadContext, file: SharedFile, wanted: list[tuple[StorageInfo, ReadItem]], _: Metadata
) -> list[Callable[[], None]]:
    return [
        object_job(Source(context, file, place), item)
        for place, item in wanted
        if item.type == LoadItemType.BYTE_IO
    ]


def _tensor_jobs(
    context: ReadContext, file: SharedFile, wanted: list[tuple[StorageInfo, ReadItem]], metadata: Metadata
) -> list[Callable[[], None]]:
    jobs: list[Callable[[], None]] = []
    small: list[tuple[Chunk, ReadItem]] = []
    for place, item in wanted:
        if item.type == LoadItemType.BYTE_IO:
            continue
        chunk = _chunk(place, item.storage_index, metadata)
        if is_small(chunk, item):
            small.append((chunk, item))
        else:
            jobs += tensor_jobs(Source(context, file, place), chunk, item)
    return [*pack_jobs(context, file, small), *jobs]


def _chunk(place: StorageInfo, index: MetadataIndex, metadata: Metadata) -> Chunk:
    entry = metadata.state_dict_metadata[index.fqn]
    assert isinstance(entry, TensorStorageMetadata)
    chunks, hint = entry.chunks, index.index
    box = chunks[hint] if hint is not None and hint < len(chunks) else None
    if box is None or box.offsets != index.offset:
        box = next((c for c in chunks if index.offset is None or c.offsets == index.offset), None)
    if box is None:
        raise InvalidPlanError(f"{index.fqn}: the checkpoint has no chunk at {index.offset}", key=index.fqn)
    chunk = Chunk(place, box.sizes, entry.properties.dtype)
    if place.is_checked and not place.transform_descriptors and place.payload_nbytes != chunk.nbytes:
        raise MetadataFormatError(
            f"{index.fqn}: a chunk of shape {tuple(box.sizes)} of {chunk.dtype} takes {chunk.nbytes} bytes, "
            f"but the metadata has {place.payload_nbytes}",
            key=index.fqn,
            expected=chunk.nbytes,
            found=place.payload_nbytes,
        )
    return chunk


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
