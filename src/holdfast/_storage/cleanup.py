"""Owns the removal of files: those of the checkpoint that was replaced, of dead saves, and of failed ones.

No file is removed because it stands in a listing and nobody knows it. A data file in our naming goes if its
save is neither the committed one nor alive. One in torch's naming, which tells no save, goes only if the
metadata that was replaced had named it.
"""

import logging
from collections.abc import Iterable

from holdfast._format import metadata_file
from holdfast._format.manifest import decode
from holdfast._format.names import is_leftover, metadata_name, metadata_rank, parse_data_file
from holdfast._io.lease import Lease
from holdfast._io.store import ByteStore
from holdfast._storage.metadata_reading import load_metadata
from holdfast._storage.reading import LARGEST_METADATA
from holdfast.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["delete_quietly", "discard_files", "files_to_replace", "remove_replaced"]

logger = logging.getLogger(__name__)


def files_to_replace(store: ByteStore, *, rank: int | None) -> set[str]:
    """Before a commit: the data files of the checkpoint there that only its metadata tells to be its own.

    These are files in torch's naming; and all files, where the store cannot list them.

    Args:
        store: The checkpoint's place.
        rank: The rank whose own part is to be replaced; None for a whole checkpoint, with all such parts.
    """
    named_by = {metadata_name(rank)}
    if store.traits.can_list:
        names = store.names()
        if not any((file := parse_data_file(name)) and file.save is None for name in names):
            return set()
        if rank is None:
            named_by |= {name for name in names if metadata_rank(name) is not None}
    files: set[str] = set()
    for name in named_by:
        try:
            files |= _files_named_by(store, name)
        except CheckpointNotFoundError:  # noqa: PERF203 - one file, or one for each rank
            continue
        except (CheckpointError, OSError) as error:
            logger.warning("%s: %s is replaced, and its files stay: %s", store.url, name, error)
    return files


def _files_named_by(store: ByteStore, name: str) -> set[str]:
    """The data files that a metadata file names.

    Raises:
        CheckpointError, OSError: It is missing, damaged, or cannot be read now.
    """
    data = store.read(name, max_bytes=LARGEST_METADATA)
    manifest = metadata_file.split(data, path=name).manifest
    if manifest is not None:
        named = set(decode(manifest, path=name).file_names)
    else:
        named = {place.relative_path for place in load_metadata(data, path=name).storage_data.values()}
    # Names in metadata come from strangers: only what is called like a data file is one.
    return {file for file in named if parse_data_file(file)}


def remove_replaced(
    store: ByteStore,
    lease: Lease,
    used: Iterable[str],
    replaced: set[str],
    *,
    footer: bytes,
    rank: int | None,
) -> None:
    """After a commit: remove what belongs neither to the checkpoint nor to a living save.

    A failure is logged and not raised: the checkpoint is complete, and the files are only in the way.

    Args:
        store: The checkpoint's place.
        lease: That of the save that has committed.
        used: The data files that it committed.
        replaced: What ``files_to_replace`` returned before the commit.
        footer: The end of the metadata that it committed.
        rank: For one rank's own part, that rank: files of other ranks are not touched.
    """
    try:
        if store.traits.can_list:
            store.delete(_removable(store, lease, set(used), replaced, footer, rank))
        else:
            store.delete(replaced.difference(used))
    except Exception as error:  # noqa: BLE001 - a stranger's file system may raise anything
        logger.warning("%s: files of an earlier save could not be removed: %s", store.url, error)


def _removable(
    store: ByteStore, lease: Lease, used: set[str], replaced: set[str], footer: bytes, rank: int | None
) -> list[str]:
    # The order matters: files, then leases, then metadata. The save of a file that is listed here had its
    # lease before the file. So either the lease is found, or the save is over: then the metadata names the
    # file, or nobody will.
    data, other = dict[str, str | None](), list[str]()
    for name in store.names() - used:
        file = parse_data_file(name)
        if file and (rank is None or file.rank == rank) and (file.save or name in replaced):
            data[name] = file.save
        elif rank is None and (metadata_rank(name) is not None or is_leftover(name)):
            other.append(name)
    if not data and not other:
        return []
    names = store.names()
    living, dead = lease.others(names)
    if lease.name not in names:
        logger.warning("%s: another save took this one for dead; files of earlier saves stay", store.url)
        return []
    # Parts of ranks and temporary files do not tell whose they are.
    removable = dead + ([] if living else other)
    if not _ends_with(store, metadata_name(rank), footer):
        # Another save has committed since. If its metadata cannot be read, nothing is removed.
        used = _files_named_by(store, metadata_name(rank))
    if rank is not None and store.exists(metadata_name()):
        used = used | _files_named_by(store, metadata_name())
    return removable + [name for name, save in data.items() if save not in living and name not in used]


def _ends_with(store: ByteStore, name: str, footer: bytes) -> bool:
    with store.open(name) as file:
        end = bytearray(min(len(footer), file.nbytes))
        file.read_into(file.nbytes - len(end), end)
    return end == footer


def discard_files(store: ByteStore, names: Iterable[str], *, rank: int | None) -> None:
    """After a save that failed: remove its files, except those that the checkpoint in the place names.

    The step that failed may have come after the commit: then they are part of the new checkpoint.
    """
    try:
        used = _files_named_by(store, metadata_name(rank))
    except CheckpointNotFoundError:
        used = set()
    except Exception as error:  # noqa: BLE001 - a stranger's file system may raise anything
        logger.warning("%s: files of a failed save stay, as nobody knows if it was: %s", store.url, error)
        return
    delete_quietly(store, [name for name in names if name not in used])


def delete_quietly(store: ByteStore, names: Iterable[str]) -> None:
    """Remove files after a failure, which is already on its way to the caller."""
    try:
        store.delete(names)
    except Exception as error:  # noqa: BLE001 - a stranger's file system may raise anything
        logger.warning("%s: files of a failed save could not be removed: %s", store.url, error)
