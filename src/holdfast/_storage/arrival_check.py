"""Owns the look before a commit whether the files of the other ranks are where the coordinator reads.

If each host has a disk of its own under the same path, or a relative path leads ranks into different folders,
every rank writes and counts its files, and no place has the whole checkpoint. Nobody but the coordinator can
tell, and only by looking.
"""

import socket
import time
from collections.abc import Mapping

from holdfast._human_units import some_of
from holdfast._io.store import ByteStore
from holdfast.errors import CheckpointNotFoundError, IncompleteWriteError

WAIT_SECONDS = 30.0
"""How long a file may be late: network file systems remember for seconds what a folder had."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0


def check_arrived(store: ByteStore, files: Mapping[str, int]) -> None:
    """On the coordinator: return when all files are there.

    It costs one listing where everything is in order. A store that cannot list is trusted, and one that lists
    no sizes is believed to have whole files.

    Args:
        store: The place.
        files: The data files of other ranks, with the bytes that each must have at least.

    Raises:
        IncompleteWriteError: Some are not there, or shorter, after ``WAIT_SECONDS``.
    """
    pause, deadline = _FIRST_PAUSE, time.monotonic() + WAIT_SECONDS
    while files and store.can_list:
        absent = _absent(store, files)
        if not absent:
            return
        if time.monotonic() > deadline:
            raise _not_shared(store, absent, len(files))
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _absent(store: ByteStore, files: Mapping[str, int]) -> list[str]:
    """The files that are not there, or are too short."""
    if not store.traits.lists_sizes:
        return sorted(files.keys() - store.names())
    sizes = store.list()
    return [
        name
        for name, nbytes in files.items()
        if sizes.get(name, -1) < nbytes and _nbytes_when_opened(store, name) < nbytes
    ]


def _nbytes_when_opened(store: ByteStore, name: str) -> int:
    """The size of a file; -1 if there is none. Opening is what makes NFS ask its server."""
    try:
        with store.open(name) as file:
            return file.nbytes
    except CheckpointNotFoundError:
        return -1


def _not_shared(store: ByteStore, absent: list[str], count: int) -> IncompleteWriteError:
    return IncompleteWriteError(
        f"{store.url}: files that other ranks have written are not there, or not whole, on the coordinator's "
        f"host {socket.gethostname()} ({len(absent)} of {count}: {some_of(absent, 3)}). All ranks "
        "must save to storage that all hosts share. Disks of single hosts under the same path do not do, nor "
        "does a relative path if the ranks are in different working directories.",
        path=store.url,
        expected=count,
        found=count - len(absent),
    )
