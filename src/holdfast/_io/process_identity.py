"""What tells a process from all others, on this machine and elsewhere, and whether it runs."""

import functools
import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessIdentity:
    """Enough to look a process up from the same machine, and to name it to a user.

    Attributes:
        host: The machine's name.
        boot: What tells this run of this machine from all others; empty if the system does not tell.
        pid_namespace: What tells the machine's containers apart, as far as process numbers go.
        pid: The process.
        started: When the process began, in ticks since the machine did; a later process may have its number.
    """

    host: str
    boot: str
    pid_namespace: str
    pid: int
    started: int

    def is_this_process(self) -> bool:
        """Whether it is the identity of this process."""
        return vars(self).items() >= vars(this_process()).items()

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


def this_process() -> ProcessIdentity:
    """The identity of this process. A forked child has another one."""
    return _identity(os.getpid())


@functools.lru_cache(maxsize=1)
def _identity(pid: int) -> ProcessIdentity:
    try:
        started = _start_of(pid) or 0
    except OSError:
        started = 0
    return ProcessIdentity(socket.gethostname(), *_machine(), pid, started)


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
