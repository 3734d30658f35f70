"""Limits on this process and all that it starts: a control group of their own, in either version."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from benchmarks.case import SkippedError

__all__ = ["SlowVolume", "limited_memory", "remove_groups_of", "slow_volume"]

_MOUNTS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_NAME = "holdfast-bench-"


class SlowVolume:
    """A disk that takes so many bytes a second from this process and all that it starts.

    Args:
        group: The control group.
        device: The disk, by its two numbers.
    """

    def __init__(self, group: Path, device: str) -> None:
        self._group = group
        self._device = device

    def moved(self, way: Literal["read", "write"]) -> int:
        """Bytes that were read, or written, under the limit so far."""
        new = self._group / "io.stat"
        lines = (new if new.exists() else self._group / "blkio.throttle.io_service_bytes").read_text("ascii")
        for line in lines.splitlines():
            device, *fields = line.split()
            # Version 1 has a line for each way and disk, version 2 one for each disk.
            pairs = [field.split("=") for field in fields] if new.exists() else [fields]
            for name, value in pairs if device == self._device else ():
                if name in {way.capitalize(), f"{way[0]}bytes"}:
                    return int(value)
        return 0


@contextmanager
def slow_volume(folder: Path, bytes_per_second: int) -> Iterator[SlowVolume]:
    """Limit how fast the disk of ``folder`` is read and written.

    Raises SkippedError where that is impossible, as ``limited_memory`` does.
    """
    numbers = folder.stat().st_dev
    device = f"{os.major(numbers)}:{os.minor(numbers)}"
    limit = f"{device} {bytes_per_second}"
    old = {f"blkio.throttle.{way}_bps_device": limit for way in ("read", "write")}
    new = {"io.max": f"{device} rbps={bytes_per_second} wbps={bytes_per_second}"}
    with _group("blkio", old, "io", new) as group:
        yield SlowVolume(group, device)


@contextmanager
def limited_memory(nbytes: int) -> Iterator[None]:
    """Limit memory, page cache included."""
    with _group("memory", {"memory.limit_in_bytes": str(nbytes)}, "memory", {"memory.max": str(nbytes)}):
        yield


def remove_groups_of(process: int) -> None:
    """Remove what a process left that was killed; all that it started must have ended."""
    for group in _MOUNTS.glob(f"**/{_NAME}{process}"):
        _remove(group)


@contextmanager
def _group(old_name: str, old: dict[str, str], new_name: str, new: dict[str, str]) -> Iterator[Path]:
    """A new group that this process is in meanwhile, with settings for the older or the newer version."""
    if (_MOUNTS / old_name).is_dir():
        home = _home(_MOUNTS / old_name, old_name)
        parent, settings = home, old
    else:
        home = _home(_MOUNTS, "")
        # Here a group that has processes has no groups below it, so the new one stands beside that of this
        # process.
        parent, settings = home if home == _MOUNTS else home.parent, new
    group = parent / f"{_NAME}{os.getpid()}"
    try:
        if settings is new:
            (parent / "cgroup.subtree_control").write_text(f"+{new_name}", "ascii")
        group.mkdir()
        for name, value in settings.items():
            (group / name).write_text(value, "ascii")
        _enter(group)
    except OSError as error:
        _remove(group)
        raise SkippedError(f"no control group with a limit can be made: {error}") from error
    try:
        yield group
    finally:
        _enter(home)
        _remove(group)


def _home(mount: Path, controller: str) -> Path:
    """The group of this process."""
    for line in _OWN.read_text("ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        # The newer version has one line, with no name.
        if controller in controllers.split(","):
            return mount / path.lstrip("/")
    raise SkippedError(f"the kernel does not tell the control group ({controller or 'version 2'})")


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()), "ascii")


def _remove(group: Path) -> None:
    try:
        group.rmdir()
    except OSError:
        pass  # not made, or somebody is still in it
