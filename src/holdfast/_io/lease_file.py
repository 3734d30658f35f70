"""The file of a lease: what it says, how it is written and read, and whether its save is alive.

A save whose process can be looked up from here is alive exactly as long as the process is. Any other is dead
when its lease was not renewed for ``EXPIRY_SECONDS`` by the clock of the store.
"""

import errno
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import msgspec

from holdfast._format.names import lease_name, save_of_lease
from holdfast._io.process_identity import ProcessIdentity, this_process
from holdfast._io.store import ByteStore
from holdfast.errors import CheckpointError

EXPIRY_SECONDS = 60.0

held_here: set[str] = set()
"""The leases of this process that are not released yet. One that could not be removed is not among them."""

_NO_RIGHT = {errno.EACCES, errno.EPERM, errno.EROFS}
_MOST_BYTES = 16 << 20  # a lease that replaces files in torch's naming lists them


@dataclass(frozen=True)
class LeaseHolder(ProcessIdentity):
    """The process that writes, as a lease says it.

    Attributes:
        shared: Whether other saves of this kind may run beside this one.
        renewed_ns: When the lease was written, by the clock of its writer, for stores that tell no times.
        replaces: What the save removes once it has committed: saves whose data files go, and names of data
            files that tell no save. If it is killed, the next save learns here what is left to remove.
        dead: The killed saves whose leases it has removed, and whose files it may not have removed yet.
        over: Whether the save is over, and the lease stays only for what it could not remove.
    """

    shared: bool
    renewed_ns: int
    replaces: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()
    over: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


UNKNOWN = LeaseHolder("?", "", "", 0, 0, shared=False, renewed_ns=0)
"""Stands for the holder of a lease that cannot be read: it may be in the middle of a renewal."""


class LeaseFile:
    """The lease of a save of this process, as a file.

    Args:
        store: The place.
        save_id: The save.
        shared: As in ``LeaseHolder``.

    Attributes:
        name: The name of the file.
    """

    def __init__(self, store: ByteStore, save_id: str, *, shared: bool) -> None:
        self.store, self.name = store, lease_name(save_id)
        self._shared = shared
        self._replaces: set[str] = set()
        self._dead: set[str] = set()

    def write(self) -> None:
        """Make the file.

        Raises:
            OSError: It cannot be written. The error names the place, if the right to write there is missing.
        """
        # In one step: a lease that a killed process left half written would name nobody, and keep the place
        # closed until it expires.
        for attempt in range(3):
            try:
                self.store.replace(self.name, self._content(), durable=False)
            except FileNotFoundError:  # noqa: PERF203 - a clean-up may take the temporary file for a leftover
                if attempt == 2:
                    raise
            except OSError as error:
                if error.errno not in _NO_RIGHT:
                    raise
                # The error names the folder: users do not know what a lease is.
                text = f"{error.strerror}; a save needs the right to make files in this folder"
                raise type(error)(error.errno, text, self.store.url) from error
            else:
                return

    def rewrite(self, *, over: bool = False) -> bool:
        """Renew the file, in any thread; ``over`` as in ``LeaseHolder``. False if it is gone."""
        return self.store.rewrite(self.name, self._content(over=over))

    def note(self, *, replaces: Iterable[str] = (), dead: Iterable[str] = ()) -> None:
        """Write down more of what the save removes, as in ``LeaseHolder``, besides what is noted already."""
        before = len(self._replaces) + len(self._dead)
        self._replaces.update(replaces)
        self._dead.update(dead)
        if len(self._replaces) + len(self._dead) != before:
            self.rewrite()

    def _content(self, *, over: bool = False) -> bytes:
        holder = LeaseHolder(
            **asdict(this_process()),
            shared=self._shared,
            renewed_ns=time.time_ns(),
            replaces=tuple(sorted(self._replaces.copy())),
            dead=tuple(sorted(self._dead.copy())),
            over=over,
        )
        return msgspec.json.encode(holder)


def read_lease(store: ByteStore, name: str) -> LeaseHolder | None:
    """What a lease says; None if there is none, or if it cannot be read or is not written completely."""
    try:
        return msgspec.json.decode(store.read(name, max_bytes=_MOST_BYTES), type=LeaseHolder)
    except (OSError, CheckpointError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


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
    # A process of another machine or another user, which cannot be looked up: the age of the lease decides.
    renewed_ns = store.modified_ns(name)
    if renewed_ns is None or now_ns is None:
        now_ns = time.time_ns()
        # Nothing is known of it: it is alive until somebody can tell.
        renewed_ns = holder.renewed_ns if holder else now_ns
    return now_ns - renewed_ns <= EXPIRY_SECONDS * 1e9
