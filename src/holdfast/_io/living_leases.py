"""Which leases of a place belong to living saves, and which to dead ones.

A save whose process can be looked up from here is alive exactly as long as the process is. Any other is dead
when its lease was not renewed for ``EXPIRY_SECONDS`` by the clock of the store.
"""

import time
from collections.abc import Iterable

from holdfast._format.names import save_of_lease
from holdfast._io.lease_file import UNKNOWN, LeaseHolder, read_lease
from holdfast._io.store import ByteStore

EXPIRY_SECONDS = 60.0

held_here: set[str] = set()
"""The leases of this process that are not released: one that could not be removed is over all the same."""


def living_and_dead(
    store: ByteStore, names: Iterable[str], now_ns: int | None
) -> tuple[dict[str, LeaseHolder], dict[str, LeaseHolder | None]]:
    """Look at leases, given by their names.

    Args:
        store: Where they are.
        names: The leases.
        now_ns: The time by the clock of the store; None if it tells none.

    Returns:
        The living saves with their holders; the leases of the dead by name, with what these say. A lease that
        is gone by now is in neither: its save is over, and has left nothing.
    """
    living, dead = dict[str, LeaseHolder](), dict[str, LeaseHolder | None]()
    for name in names:
        holder, save = read_lease(store, name), save_of_lease(name)
        if holder is None and not store.exists(name):
            continue
        if save and _is_alive(store, name, holder, now_ns):
            living[save] = holder or UNKNOWN
        else:
            dead[name] = holder
    return living, dead


def find_living(store: ByteStore) -> LeaseHolder | None:
    """Some holder of a lease of a living save; None if there is none. For messages."""
    leases = [name for name in store.names() if save_of_lease(name)]
    living, _ = living_and_dead(store, leases, time.time_ns())
    return next(iter(living.values()), None)


def _is_alive(store: ByteStore, name: str, holder: LeaseHolder | None, now_ns: int | None) -> bool:
    """Whether the save of a lease goes on."""
    if holder and holder.over:
        return False
    if holder and name not in held_here and holder.is_this_process():
        return False
    running = holder.is_running() if holder else None
    if running is not None:
        return running
    # Of another machine, or another user's, perhaps, who lets nobody read it: its age must do.
    renewed_ns = store.modified_ns(name)
    if renewed_ns is None or now_ns is None:
        now_ns = time.time_ns()
        # Nothing is known of it: it is alive until somebody can tell.
        renewed_ns = holder.renewed_ns if holder else now_ns
    return now_ns - renewed_ns <= EXPIRY_SECONDS * 1e9
