"""Owns where the helper runs while it writes: on the CPUs that its disk interrupts.

A virtual disk often has one queue, and so interrupts one CPU, whoever writes. Each interrupt of a virtual
machine costs whatever computes there far more than the few instructions that it runs. A helper that is busy
on that CPU keeps the trainer off it: the scheduler moves the trainer, which may run anywhere, to another.

Disks with a queue for each CPU interrupt the one that has written; there, nothing is done.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["beside_its_interrupts", "interrupted_cpus"]


@contextlib.contextmanager
def beside_its_interrupts(writer: Any) -> Iterator[None]:
    """Keep this thread, and those that it starts, near the disk of a writer inside a with-block.

    Only one that waits for its disk and for nothing else: transforms, and threads that somebody has asked
    for, want as many CPUs as there are.
    """
    path = getattr(writer, "path", None)
    is_plain = getattr(writer, "extensions", None) == () and hasattr(os, "sched_setaffinity")
    if not is_plain or not isinstance(path, str | os.PathLike):
        yield
        return
    before = os.sched_getaffinity(0)
    wanted = interrupted_cpus(path) & before
    is_reason = wanted != before and len(wanted) >= getattr(writer, "thread_count", 1)
    if not is_reason or not _keep_to(wanted):
        yield
        return
    try:
        yield
    finally:
        _keep_to(before)


def interrupted_cpus(path: "str | os.PathLike[str]", *, root: "str | os.PathLike[str]" = "/") -> set[int]:
    """The CPUs that the virtual disk below ``path`` interrupts; none if that is not known.

    Args:
        path: A file or folder, which need not exist yet.
        root: Where ``sys`` and ``proc`` are.
    """
    try:
        return set(_found(Path(path), Path(root)))
    except (OSError, ValueError):
        return set()  # a file system without a disk, a container that hides it, a system that is not Linux


def _found(path: Path, root: Path) -> Iterator[int]:
    device = _nearest_that_exists(path).stat().st_dev
    block = root / "sys/dev/block" / f"{os.major(device)}:{os.minor(device)}"
    queues = tuple(f"{driver}-req" for disk in _disks_of(block.resolve()) for driver in _drivers_of(disk))
    for line in (root / "proc/interrupts").read_text().splitlines():
        number, _, described = line.partition(":")
        if described.strip() and described.split()[-1].startswith(queues):
            yield from _cpus_in((root / "proc/irq" / number.strip() / "effective_affinity_list").read_text())


def _nearest_that_exists(path: Path) -> Path:
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def _disks_of(block: Path) -> Iterator[Path]:
    """The disks below a partition, or below a volume of several."""
    below = block / "slaves"
    parts = list(below.iterdir()) if below.is_dir() else []
    for part in parts:
        yield from _disks_of(part.resolve())
    if not parts:
        yield block.parent if (block / "partition").exists() else block


def _drivers_of(disk: Path) -> Iterable[str]:
    """What the interrupts of a virtual disk are named after: "virtio1", and behind a controller as well."""
    return (part for part in (disk / "device").resolve().parts if part.startswith("virtio"))


def _cpus_in(described: str) -> Iterator[int]:
    """The numbers in a list such as "0-3,8"."""
    for part in described.strip().split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _keep_to(cpus: set[int]) -> bool:
    """Whether this thread runs there only from now on, which some sandboxes forbid."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        return False
    return True
