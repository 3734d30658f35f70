"""Owns the removal of files: those of the checkpoint that was replaced, of killed saves, and of failed ones.

No file is removed because it stands in a listing and nobody knows it. A data file goes if the metadata that
was replaced had named it, or if its save was killed, which its lease shows. Whatever else is called like a
data file stays, with a warning: it may be the checkpoint of somebody who has moved its metadata away.
"""

import logging
from collections.abc import Callable, Collection, Iterable

from holdfast._contents.safetensors_files import LARGEST_INDEX
from holdfast._format.foreign_manifest import data_files_in
from holdfast._format.metadata_file import LARGEST_METADATA
from holdfast._format.names import (
    METADATA,
    SAVE_DIGITS,
    describe_data_files,
    is_leftover,
    metadata_name,
    metadata_rank,
    parse_data_file,
    save_of_lease,
)
from holdfast._format.safetensors import SUFFIX
from holdfast._format.safetensors_index import INDEX, parse_index, save_in_name
from holdfast._human_units import some_of
from holdfast._io.lease import Lease
from holdfast._io.store import ByteStore
from holdfast.errors import CheckpointError, CheckpointNotFoundError

logger = logging.getLogger(__name__)
_MOST_NAMED = 8


def known_by(name: str) -> str:
    """What a lease notes of a file that goes: its save, or its name where that tells no save."""
    file = parse_data_file(name)
    return (file.save if file else save_in_name(name)) or name


def files_of_save(store: ByteStore, save_id: str) -> list[str] | None:
    """After a save that failed: its files, whichever rank wrote them, as far as their names tell the save.

    Returns:
        None if the store does not answer. That is logged and not raised.
    """
    try:
        names = store.names() if store.can_list else ()
    except Exception as error:  # noqa: BLE001 - the reason of the failed save is on its way to the caller
        logger.warning("%s: files of a failed save cannot be found now: %s", store.url, error)
        return None
    return [name for name in names if known_by(name) == save_id[:SAVE_DIGITS]]


def files_to_replace(store: ByteStore, *, rank: int | None) -> set[str]:
    """Before a commit: the data files of the checkpoint there, as its metadata names them.

    Args:
        store: The checkpoint's place.
        rank: The rank whose own part is to be replaced; None for a whole checkpoint, with all such parts.
    """
    named_by = {metadata_name(rank)}
    if store.can_list:
        names = store.names()
        if rank is None:
            named_by |= {name for name in names if metadata_rank(name) is not None}
        named_by &= names
    files: set[str] = set()
    for name in named_by:
        try:
            files |= files_named_by(store, name)
        except CheckpointNotFoundError:  # noqa: PERF203 - one file, or one for each rank
            continue
        except (CheckpointError, OSError) as error:
            logger.warning("%s: %s is replaced, and its files stay: %s", store.url, name, error)
    return files


def files_named_by(store: ByteStore, name: str) -> set[str]:
    """The data files that a metadata file names.

    Raises:
        CheckpointError, OSError: It is missing, damaged, or cannot be read now.
    """
    try:
        data = store.read(name, max_bytes=LARGEST_METADATA)
    except CheckpointError:
        raise
    except OSError:
        # Once more: if it cannot be read, the files that it names stay for ever.
        data = store.read(name, max_bytes=LARGEST_METADATA)
    # Names in metadata come from strangers: only what is called like a data file is one.
    return {file for file in data_files_in(data, path=name) if parse_data_file(file)}


def files_of_index(store: ByteStore, there: Collection[str]) -> set[str]:
    """The safetensors files that the index in a folder names; none if there is no index.

    Raises:
        CheckpointError: The index cannot be read.
    """
    if INDEX not in there:
        return set()
    data = store.read(INDEX, max_bytes=LARGEST_INDEX)
    named = parse_index(data, path=f"{store.url}/{INDEX}").values()
    return {name for name in named if name.endswith(SUFFIX)}


def remove_dead(store: ByteStore, lease: Lease) -> None:
    """At the beginning of a save: remove the files of the killed saves whose leases it has found.

    A killed save may have committed before: what any metadata or index names stays. If some of these cannot
    be read, everything stays. A failure is logged and not raised.

    Args:
        store: The checkpoint's place.
        lease: That of the save that begins.
    """
    if not lease.dead:
        return
    try:
        names = store.names()
        there = [name for name in names if name == METADATA or metadata_rank(name) is not None]
        models = files_of_index(store, names)
        used = models.union(*(files_named_by(store, name) for name in there))

        def is_gone(name: str) -> bool:
            # A killed save had replaced what it meant to, if there is a checkpoint that names something else.
            has_successor = there if parse_data_file(name) else models and name.endswith(SUFFIX)
            known = known_by(name)
            return known in lease.dead or bool(has_successor and {known, name} & lease.left_by_dead)

        doomed = list(filter(is_gone, names - used))
        if doomed:
            store.sync()  # the commit of the dead save may not be durable yet
            store.delete(doomed)
        store.abort_unfinished(lambda name: known_by(name) in lease.dead)
    except Exception as error:  # noqa: BLE001 - a stranger's file system may raise anything
        logger.warning("%s: files of a killed save could not be removed: %s", store.url, error)
    else:
        lease.settle()
        if doomed:
            logger.info(
                "%s: removed %s, left by a killed save", store.url, some_of(sorted(doomed), _MOST_NAMED)
            )


def remove_replaced(
    store: ByteStore,
    lease: Lease,
    used: Iterable[str],
    replaced: set[str],
    *,
    footer: bytes,
    rank: int | None,
) -> None:
    """After a commit: remove what the checkpoint has replaced, and name what stays though nobody uses it.

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
        if store.can_list:
            store.delete(_removable(store, lease, set(used), replaced, footer, rank))
        else:
            store.delete(replaced.difference(used))
    except BaseException as error:
        lease.leave()
        if not isinstance(error, Exception):
            raise
        # Whatever it is: a stranger's file system may raise anything.
        logger.warning("%s: files of an earlier save could not be removed: %s", store.url, error)


def _removable(
    store: ByteStore, lease: Lease, used: set[str], replaced: set[str], footer: bytes, rank: int | None
) -> list[str]:
    # The order matters: files, then leases, then metadata. The save of a file that is listed here had its
    # lease before the file. So either the lease is found, or the save is over: then the metadata names the
    # file, or nobody will.
    listed, other = store.names(), list[str]()
    data = {
        name: file.save
        for name in listed
        if (file := parse_data_file(name)) and (rank is None or file.rank == rank)
    }
    if rank is None:
        other = [name for name in listed if metadata_rank(name) is not None or is_leftover(name)]
    if not data.keys() - used and not other:
        return []
    names = store.names()
    living, _ = lease.others(names)
    if lease.name not in names:
        logger.warning("%s: another save took this one for dead; files of earlier saves stay", store.url)
        return []
    if not _ends_with(store, metadata_name(rank), footer):
        # Another save has committed since, over this one. If its metadata cannot be read, nothing is removed.
        replaced = replaced | used
        used = files_named_by(store, metadata_name(rank))
    if rank is not None and store.exists(metadata_name()):
        used = used | files_named_by(store, metadata_name())
    under_way = {save for name in names if (save := save_of_lease(name))}
    unused = [name for name, save in data.items() if name not in used and save not in under_way]
    _warn_of_strangers(store, [name for name in unused if name not in replaced])
    # Parts of ranks and temporary files do not tell whose they are.
    return ([] if living else other) + [name for name in unused if name in replaced]


def _warn_of_strangers(store: ByteStore, names: list[str]) -> None:
    if names:
        logger.warning(
            "%s: it has %s of no checkpoint known here; they stay. If somebody has moved "
            "their metadata away, or it was damaged, put it and these files into another folder. Otherwise "
            "remove them: %s",
            *(store.url, describe_data_files(names), some_of(sorted(names), _MOST_NAMED)),
        )


def _ends_with(store: ByteStore, name: str, footer: bytes) -> bool:
    with store.open(name) as file:
        end = bytearray(min(len(footer), file.nbytes))
        file.read_into(file.nbytes - len(end), end)
    return end == footer


def discard_files(store: ByteStore, names: Iterable[str], find_used: Callable[[], set[str]]) -> bool:
    """After a save that failed: remove its files, except those that the checkpoint in the place names.

    The step that failed may have come after the commit: then they are part of the new checkpoint.

    Args:
        store: The checkpoint's place.
        names: The files.
        find_used: Gives the files that the checkpoint names; it may raise.

    Returns:
        Whether nothing of the save is left.
    """
    mine = set(names)
    if not mine:
        return True  # the place may be what failed
    try:
        used = find_used()
    except CheckpointNotFoundError:
        used = set()
    except Exception as error:  # noqa: BLE001 - a stranger's file system may raise anything
        logger.warning("%s: files of a failed save stay, as nobody knows if it was: %s", store.url, error)
        return False
    return delete_quietly(store, mine - used) and used.isdisjoint(mine)


def abort_uploads_of(store: ByteStore, save_id: str, names: Collection[str] = ()) -> bool:
    """After a save: abort its unfinished uploads, of killed ranks or of requests whose answer was lost.

    A failure is only logged.

    Args:
        store: The checkpoint's place.
        save_id: The save.
        names: Files of it whose names do not tell the save.

    Returns:
        Whether nothing of it is left.
    """
    save = save_id[:SAVE_DIGITS]
    try:
        store.abort_unfinished(lambda name: known_by(name) == save or name in names)
    except Exception as error:  # noqa: BLE001 - whether the save has failed or not, this changes nothing
        logger.info("%s: unfinished uploads may be left: %s", store.url, error)
        return False
    return True


def delete_quietly(store: ByteStore, names: Iterable[str]) -> bool:
    """Remove files after a failure, which is already on its way to the caller; return whether it worked."""
    try:
        store.delete(names)
    except Exception as error:  # noqa: BLE001 - a stranger's file system may raise anything
        logger.warning("%s: files of a failed save could not be removed: %s", store.url, error)
        return False
    return True
