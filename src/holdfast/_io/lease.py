"""Owns leases: small files by which saves into one place know of each other, and the dead from the living.

A save writes its lease before its first data file, renews it while it runs, and removes it when it is over.
A lock of the file system (``ByteStore.claim``) is taken as well; but locks may be missing, or end at the
machine, so that a lease decides. The rules:

- Who finds the lease of another living save removes its own and gives up.
- Who finds the lease of a dead save removes it, before it writes anything itself.
- Who does not find its own lease directly before its commit was taken for dead, and commits nothing.

A save whose process can be looked up from here is alive exactly as long as the process is. Any other is
dead when its lease was not renewed for ``EXPIRY_SECONDS`` by the clock of the store. Not guaranteed: what
happens if a process is stopped, for longer than that, between the last look at its lease and the commit.
"""

import dataclasses
import functools
import logging
import os
import random
import socket
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from holdfast._format.names import lease_name, save_of_lease
from holdfast._io.pool import Worker
from holdfast._io.store import ByteStore, Claim
from holdfast.errors import CheckpointError, StorageError

logger = logging.getLogger(__name__)

RENEWAL_SECONDS = 10.0
EXPIRY_SECONDS = 60.0
# Two saves that begin at the same moment may see each other. Then both draw back, and try again.
_ATTEMPTS = 5
_held: set[str] = set()
"""The leases of this process that are not released: one that could not be removed is over all the same."""
_LONGEST_PAUSE = 0.2
_MOST_BYTES = 16 << 20  # a lease that replaces files in torch's naming lists them


@dataclass(frozen=True)
class LeaseHolder:
    """Who writes: enough to look the process up from the same machine, and to name it to a user.

    Attributes:
        host: The machine's name.
        boot: What tells this run of this machine from all others; empty if the system does not tell.
        pid_namespace: What tells the machine's containers apart, as far as process numbers go.
        pid: The process.
        started: When the process began, in ticks since the machine did; a later process may have its number.
        shared: Whether other saves of this kind may run beside this one.
        renewed_ns: When the lease was written, by the clock of its writer, for stores that tell no times.
        replaces: What the save removes once it has committed: saves whose data files go, and names of data
            files that tell no save. Who finds the lease of a killed save learns here what that one left.
        over: Whether the save is over, and the lease stays only for what it could not remove.
    """

    host: str
    boot: str
    pid_namespace: str
    pid: int
    started: int
    shared: bool
    renewed_ns: int
    replaces: tuple[str, ...] = ()
    over: bool = False

    @classmethod
    def this_process(cls, *, shared: bool, replaces: Iterable[str] = ()) -> "LeaseHolder":
        """This process, now."""
        identity = _identity(os.getpid())
        return cls(*identity, shared=shared, renewed_ns=time.time_ns(), replaces=tuple(sorted(replaces)))

    def encode(self) -> bytes:
        """The content of a lease."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes | bytearray) -> "LeaseHolder | None":
        """What a lease says; None if it is not written completely, or is none."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    @property
    def identity(self) -> tuple[str, str, str, int, int]:
        """What tells its process from all others."""
        return self.host, self.boot, self.pid_namespace, self.pid, self.started

    def is_running(self) -> bool | None:
        """Whether the process runs; None if it cannot be looked up from here."""
        here = (socket.gethostname(), *_machine())
        if not self.boot or (self.host, self.boot, self.pid_namespace) != here:
            return None
        try:
            return _start_of(self.pid) == self.started
        except OSError:
            # Some systems hide the processes of other users in /proc.
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return False
            except OSError:
                pass
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@functools.lru_cache(maxsize=1)
def _identity(pid: int) -> tuple[str, str, str, int, int]:
    """This process, whose number is asked for because a forked child is another."""
    try:
        started = _start_of(pid) or 0
    except OSError:
        started = 0
    return socket.gethostname(), *_machine(), pid, started


@functools.cache
def _machine() -> tuple[str, str]:
    """The boot id and the namespace of process numbers; empty where the system does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return "", ""


def _start_of(pid: int) -> int | None:
    """When a process began, in ticks since the machine did; None if it is a zombie. Raises OSError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()
    # A process that has ended stays as a zombie until its parent asks for it.
    return None if fields[0] in {b"Z", b"X"} else int(fields[19])


_UNKNOWN = LeaseHolder("?", "", "", 0, 0, shared=False, renewed_ns=0)
"""Whoever holds a lease that cannot be read right now: it may be one that is being renewed."""


class Lease:
    """The right of one save to write into a place, until it is released, dropped, or the process ends.

    ``take_lease`` makes it, ``keep`` has it renewed. Dropping it without ``release`` frees the place, too.
    A forked child has a copy that does nothing.

    Args:
        store: The place.
        save_id: The save.
        shared: Whether other saves of this kind may run beside this one.
        claim: The lock that goes with it.

    Attributes:
        dead: The saves whose leases were found and removed when this one was taken: they were killed.
        left_by_dead: What these would have removed after their commits, as in ``LeaseHolder.replaces``.
    """

    def __init__(self, store: ByteStore, save_id: str, shared: bool, claim: Claim) -> None:
        self.dead: set[str] = set()
        self.left_by_dead: set[str] = set()
        self._store = store
        self._shared = shared
        self._replaces: set[str] = set()
        self._owner = os.getpid()
        self._over = threading.Event()
        self._left = threading.Event()
        self._thread: Worker | None = None
        self.name = lease_name(save_id)
        # Nothing that the finalizer or the thread refers to may refer to the lease.
        self._drop = weakref.finalize(
            self, _end, store, self.name, claim, self._over, self._left, self._owner
        )
        self._drop.atexit = False

    def begin(self) -> None:
        """Write the lease.

        Raises:
            OSError: It cannot be written.
        """
        _held.add(self.name)
        # In one step: a lease that a killed process left half written would name nobody, and keep the place
        # closed until it expires.
        for attempt in range(3):
            try:
                self._store.replace(self.name, self._content(), durable=False)
            except FileNotFoundError:  # noqa: PERF203 - a clean-up may take the temporary file for a leftover
                if attempt == 2:
                    raise
            else:
                return

    def _content(self) -> bytes:
        return LeaseHolder.this_process(shared=self._shared, replaces=self._replaces).encode()

    def note_replaced(self, replaces: Iterable[str]) -> None:
        """Before a commit: write down what goes after it, for the case that this process is killed between.

        Args:
            replaces: As in ``LeaseHolder``.
        """
        before = len(self._replaces)
        self._replaces.update(replaces)
        if len(self._replaces) != before:
            self._store.rewrite(self.name, self._content())

    def inherit(self, dead: "dict[str, LeaseHolder | None]") -> None:
        """End the leases of dead saves, given by their names, and take over what these had to remove."""
        self.dead |= {save for name in dead if (save := save_of_lease(name))}
        self.left_by_dead |= {left for holder in dead.values() if holder for left in holder.replaces}
        self.note_replaced(self.dead | self.left_by_dead)
        self._store.delete(dead)

    def keep(self) -> None:
        """Renew the lease from now on, in a thread. Does nothing if that goes on already."""
        if self._thread is not None:
            return
        store, name, over, shared, replaces = (
            *(self._store, self.name, self._over),
            *(self._shared, self._replaces),
        )

        def renew() -> None:
            while not over.wait(RENEWAL_SECONDS):
                try:
                    holder = LeaseHolder.this_process(shared=shared, replaces=replaces.copy())
                    if not store.rewrite(name, holder.encode()):
                        return
                except Exception as error:  # noqa: BLE001, PERF203 - the next renewal may work
                    logger.warning("%s: the lease of a save could not be renewed: %s", store.url, error)

        self._thread = Worker(renew, name="holdfast-lease")
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
        living, dead = dict[str, LeaseHolder](), dict[str, LeaseHolder | None]()
        leases = {name: save for name in names if (save := save_of_lease(name)) and name != self.name}
        if leases:
            self._store.rewrite(self.name, self._content())
        now = self._store.modified_ns(self.name) if leases else None
        for name, save in leases.items():
            holder = _read_holder(self._store, name)
            if _is_alive(self._store, name, holder, now):
                living[save] = holder or _UNKNOWN
            else:
                dead[name] = holder
        return living, dead

    def check(self) -> None:
        """Raise StorageError if another save took this one for dead: nothing must be committed then."""
        if not self._store.exists(self.name):
            raise StorageError(
                f"{self._store.url}: this save was stopped for so long that another one took it for dead and "
                "has removed its files, or is about to. Nothing was committed; save again.",
                path=self._store.url,
            )

    def release(self) -> None:
        """Remove the lease and let others in. Does nothing the second time, and nothing in a forked child."""
        try:
            self.pause()
            if self._left.is_set() and os.getpid() == self._owner and self._drop.alive:
                self._write_that_it_is_over()
        finally:
            self._drop()

    def leave(self) -> None:
        """Let the lease stay when it is released: the next save removes what this one could not."""
        self._left.set()

    def _write_that_it_is_over(self) -> None:
        holder = LeaseHolder.this_process(shared=self._shared, replaces=self._replaces)
        try:
            self._store.rewrite(self.name, dataclasses.replace(holder, over=True).encode())
        except Exception as error:  # noqa: BLE001 - a stranger's file system may raise anything
            self._left.clear()
            logger.warning("%s: what a save left cannot be noted: %s", self._store.url, error)


def _end(
    store: ByteStore, name: str, claim: Claim, over: threading.Event, left: threading.Event, owner: int
) -> None:
    if os.getpid() != owner:
        return
    over.set()
    _held.discard(name)
    try:
        if not left.is_set():
            store.delete([name])
    except Exception as error:  # noqa: BLE001 - a stranger's file system may raise anything
        logger.warning("%s: the lease of a save could not be removed: %s", store.url, error)
    finally:
        claim.release()


def _read_holder(store: ByteStore, name: str) -> LeaseHolder | None:
    """What a lease says; None if it is over, or cannot be read."""
    try:
        return LeaseHolder.decode(store.read(name, max_bytes=_MOST_BYTES))
    except (OSError, CheckpointError):
        return None


def _is_alive(store: ByteStore, name: str, holder: LeaseHolder | None, now_ns: int | None) -> bool:
    """Whether the save of a lease goes on."""
    if holder is None and not store.exists(name):
        return False
    if holder and holder.over:
        return False
    if holder and name not in _held and holder.identity == _identity(os.getpid()):
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
        shared: For ranks that write their own parts: they may be several, but not beside a joint save.

    Raises:
        StorageError: Another save is writing there.
        OSError: The lease cannot be written.
    """
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(random.uniform(0.1, 1) * _LONGEST_PAUSE)  # noqa: S311 - nothing is to be kept secret
        claim = store.claim(shared=shared)
        if claim is None:
            raise _taken(store, _somebody(store))
        lease = (Lease if store.traits.can_list else _NoLease)(store, save_id, shared, claim)
        try:
            lease.begin()
            living, dead = lease.others(store.names()) if store.traits.can_list else ({}, {})
            in_the_way = [other for other in living.values() if not (shared and other.shared)]
            if not in_the_way:
                # First of all: who was taken for dead by mistake must not commit any more.
                lease.inherit(dead)
                return lease
        except BaseException:
            lease.release()
            raise
        lease.release()
    raise _taken(store, in_the_way[0])


def _somebody(store: ByteStore) -> LeaseHolder | None:
    """Who may be the one that holds the lock of a place, for a message."""
    for name in store.names():
        if save_of_lease(name):
            holder = _read_holder(store, name)
            if _is_alive(store, name, holder, time.time_ns()):
                return holder or _UNKNOWN
    return None


def _taken(store: ByteStore, holder: LeaseHolder | None) -> StorageError:
    who = f" ({holder})" if holder else ""
    return StorageError(
        f"{store.url}: another save is writing a checkpoint into this folder right now{who}; two at once "
        "would damage each other. Give each its own folder, or save one after the other. (If every rank "
        "calls save with no_dist=True, each is such a save.)",
        path=store.url,
    )
