"""Owns leases: small files by which the saves into one place know of each other.

A save writes its lease before its first data file, renews it while it runs, and removes it when it is over.
It takes a lock of the file system (``ByteStore.claim``) too. But some file systems have no locks, or locks
that other machines do not see, so the lease decides. The rules:

- A save that finds the lease of another living save removes its own and gives up.
- A save that finds the lease of a dead save removes it, before it writes anything itself.
- A save that does not find its own lease directly before its commit was taken for dead, and commits nothing.

``lease_file`` decides which saves are dead. Not guaranteed: what happens if a process is stopped between
the last look at its lease and the commit, until its lease expires.
"""

import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from functools import partial

from holdfast._format.names import save_of_lease
from holdfast._io.lease_file import LeaseFile, LeaseHolder, find_living, held_here, living_and_dead
from holdfast._io.pool import Worker
from holdfast._io.store import ByteStore, Claim
from holdfast.errors import StorageError

logger = logging.getLogger(__name__)

RENEWAL_SECONDS = 10.0
# Two saves that begin at the same moment may see each other. Then both draw back, and try again.
_ATTEMPTS = 5
_LONGEST_PAUSE = 0.2


class Lease:
    """The right of one save to write into a place, until it is released, dropped, or the process ends.

    ``take_lease`` makes it, ``keep`` has it renewed. Dropping it without ``release`` frees the place, too.
    A forked child has a copy that does nothing.

    Args:
        file: Its file, which ``begin`` makes.
        claim: The lock that goes with it.

    Attributes:
        dead: The saves whose leases were found and removed when this one was taken, because they were killed,
            and the killed saves that these had found in the same way.
        left_by_dead: What these would have removed after their commits, as in ``LeaseHolder.replaces``.
    """

    def __init__(self, file: LeaseFile, claim: Claim) -> None:
        self.dead: set[str] = set()
        self.left_by_dead: set[str] = set()
        self.name = file.name
        self._file = file
        self._store = file.store
        self._owner = os.getpid()
        self._over = threading.Event()
        self._left = threading.Event()
        self._thread: Worker | None = None
        # Nothing that the finalizer or the thread refers to may refer to the lease.
        self._end = partial(_end, file, claim, self._over, self._left, self._owner)
        self._drop = weakref.finalize(self, self._end)
        self._drop.atexit = False

    def begin(self) -> None:
        """Write the lease.

        Raises:
            OSError: It cannot be written.
        """
        held_here.add(self.name)
        self._file.write()

    def note_replaced(self, replaces: Iterable[str]) -> None:
        """Before a commit: write down what goes after it, for the case that this process is killed between.

        Args:
            replaces: As in ``LeaseHolder``.
        """
        self._file.note(replaces=replaces)

    def inherit(self, dead: Mapping[str, LeaseHolder | None]) -> None:
        """End the leases of dead saves, given by their names, and take over what these had to remove."""
        holders = [holder for holder in dead.values() if holder]
        self.dead |= {save for name in dead if (save := save_of_lease(name))}
        self.dead |= {save for holder in holders for save in holder.dead}
        self.left_by_dead |= {left for holder in holders for left in holder.replaces}
        if dead:
            self.leave()
        self._file.note(replaces=self.left_by_dead, dead=self.dead)
        try:
            self._store.delete(dead)
        except PermissionError as error:
            # Their data stays, too: one that was taken for dead by mistake has lost nothing if it commits.
            logger.warning(
                "%s: without the right to delete, files of killed saves stay: %s", self._store.url, error
            )

    def keep(self) -> None:
        """Renew the lease from now on, in a thread. Does nothing if that goes on already."""
        if self._thread is None:
            file, over = self._file, self._over
            self._thread = Worker(lambda: _renew(file, over), name="holdfast-lease")
            self._thread.start()

    def pause(self) -> None:
        """Stop renewing the lease. When this returns, no thread of it is alive."""
        self._over.set()
        # A forked child has no such thread.
        if self._thread is not None and os.getpid() == self._owner:
            self._thread.wait()
        self._thread = None
        self._over.clear()

    def others(self, names: set[str]) -> tuple[dict[str, LeaseHolder], dict[str, LeaseHolder | None]]:
        """The other leases among ``names``, which were listed after this lease was written.

        Returns:
            The living saves with their holders; the leases of the dead by name, with what these say.
        """
        leases = [name for name in names if save_of_lease(name) and name != self.name]
        if not leases:
            return {}, {}
        # The store gives this file the time that it has now, by its own clock.
        self._file.rewrite()
        return living_and_dead(self._store, leases, self._store.modified_ns(self.name))

    def check(self) -> None:
        """Raise StorageError if another save took this one for dead: nothing must be committed then."""
        if not self._store.exists(self.name):
            raise StorageError(
                f"{self._store.url}: this save was stopped for so long that another one took it for dead and "
                "has removed its files, or is about to. Nothing was committed; save again.",
                path=self._store.url,
            )

    def release(self) -> None:
        """Remove the lease and let others in. Does nothing in a forked child.

        It does nothing the second time either, unless a signal's exception has cut off the first.
        """
        try:
            self.pause()
        finally:
            if self._drop.alive:
                self._end()
                self._drop.detach()

    def leave(self) -> None:
        """Keep the file when the lease is released: the next save removes what this one could not."""
        self._left.set()

    def settle(self) -> None:
        """Say that all files of the dead saves are removed, so that the lease need not stay for them."""
        self._left.clear()


def _renew(file: LeaseFile, over: threading.Event) -> None:
    while not over.wait(RENEWAL_SECONDS):
        try:
            if not file.rewrite():
                return
        except Exception as error:  # noqa: BLE001, PERF203 - the next renewal may work
            logger.warning("%s: the lease of a save could not be renewed: %s", file.store.url, error)


def _end(file: LeaseFile, claim: Claim, over: threading.Event, left: threading.Event, owner: int) -> None:
    if os.getpid() != owner:
        return
    over.set()
    held_here.discard(file.name)
    try:
        if not (left.is_set() and _says_that_it_is_over(file)):
            file.store.delete([file.name])
    except Exception as error:  # noqa: BLE001 - a stranger's file system may raise anything
        logger.warning("%s: the lease of a save could not be removed: %s", file.store.url, error)
    finally:
        claim.release()


def _says_that_it_is_over(file: LeaseFile) -> bool:
    try:
        file.rewrite(over=True)
    except Exception as error:  # noqa: BLE001 - a stranger's file system may raise anything
        logger.warning("%s: what a save left cannot be noted: %s", file.store.url, error)
        return False
    return True


class _NoLease(Lease):
    """The lease of a save into a store that cannot list its files: nobody would find it."""

    def begin(self) -> None:
        pass

    def note_replaced(self, replaces: Iterable[str]) -> None:
        pass

    def leave(self) -> None:
        pass

    def keep(self) -> None:
        pass

    def check(self) -> None:
        pass


def take_lease(store: ByteStore, save_id: str, *, shared: bool) -> Lease:
    """Make a place one save's own. To be called before the save writes its first file.

    Args:
        store: The place, which exists.
        save_id: The save.
        shared: Several ranks may each write their own part at the same time, but not while a joint save
            runs: True for such a part.

    Raises:
        StorageError: Another save is writing there.
        OSError: The lease cannot be written.
    """
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(random.uniform(0.1, 1) * _LONGEST_PAUSE)  # noqa: S311 - nothing is to be kept secret
        claim = store.claim(shared=shared)
        if claim is None:
            raise _taken(store, find_living(store))
        lease: Lease | None = None
        try:
            file = LeaseFile(store, save_id, shared=shared)
            lease = (Lease if store.can_list else _NoLease)(file, claim)
            lease.begin()
            living, dead = lease.others(store.names()) if store.can_list else ({}, {})
            in_the_way = [other for other in living.values() if not (shared and other.shared)]
            if not in_the_way:
                # First of all: a save that was taken for dead by mistake must not commit any more.
                lease.inherit(dead)
                return lease
        except BaseException:
            (lease or claim).release()
            raise
        lease.release()
    raise _taken(store, in_the_way[0])


def _taken(store: ByteStore, holder: LeaseHolder | None) -> StorageError:
    who = f" ({holder})" if holder else ""
    return StorageError(
        f"{store.url}: another save is writing a checkpoint into this folder right now{who}; two at once "
        "would damage each other. Give each its own folder, or save one after the other. (If every rank "
        "calls save with no_dist=True, each is such a save.)",
        path=store.url,
    )
