"""Owns the choice between the page cache and the way past it: its names, and how much the cache may take."""

import math
import os
import re
from collections.abc import Iterator
from typing import Literal, TypeAlias, cast, get_args

from holdfast.errors import UsageError

PageCache: TypeAlias = Literal["auto", "keep", "bypass"]
"""What a save or a load leaves in the page cache: what pays off, all, or nothing."""

_CHOICES = get_args(PageCache)

_FREE, _CLEAN = 2, 4
"""How many times what is to be cached must be free, or free and clean: others may still need clean pages."""


def check_page_cache(value: object) -> PageCache:
    """Return ``value`` if it is one of the choices, else raise UsageError."""
    if value not in _CHOICES:
        raise UsageError(
            f"page_cache must be one of {', '.join(map(repr, _CHOICES))}, not {value!r}", found=value
        )
    return cast("PageCache", value)


def room(*, proc: str = "/proc") -> int:
    """How many bytes more the page cache may take without pushing out what others use.

    The rule: half of what is free, or a quarter of what is free or in clean pages of files that nobody has
    used twice lately (``inactive_file``), whichever is more. That of the machine, or of the memory cgroup of
    this process or one above it, whichever is least. A system that does not tell has no room.

    Args:
        proc: Where the kernel tells of this process and of the machine.
    """
    try:
        machine = [_field(f"{proc}/meminfo", name) * 1024 for name in ("MemFree:", "Inactive(file):")]
    except (OSError, ValueError):
        return 0
    places = [machine, *map(_left_in, _memory_cgroups(proc))]
    return max(0, int(min(max(free // _FREE, (free + clean) // _CLEAN) for free, clean in places)))


def room_for(nbytes: int, *, proc: str = "/proc") -> bool:
    """Whether the page cache may take ``nbytes`` more, of all processes that use it now; see ``room``."""
    return room(proc=proc) >= nbytes


def _left_in(folder: str) -> tuple[float, float]:
    """What is free and what is clean in one cgroup, of either version; endless if it has no limit."""
    names = "memory.max", "memory.current", "inactive_file "
    if not os.path.exists(f"{folder}/{names[0]}"):
        names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "
    limit, used, unused = names
    try:
        free = int(_lines(f"{folder}/{limit}")[0]) - int(_lines(f"{folder}/{used}")[0])
        return free, _field(f"{folder}/memory.stat", unused)
    except (OSError, ValueError):  # "max" is no number; the top of the tree has no such files
        return math.inf, 0


def _memory_cgroups(proc: str) -> Iterator[str]:
    """The folder of this process's memory cgroup, and of those above it, in the trees of both versions."""
    try:
        own, mounts = _lines(f"{proc}/self/cgroup"), _lines(f"{proc}/self/mountinfo")
    except OSError:
        return
    paths: dict[str, str] = {}
    for line in own:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    for line in mounts:
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(" "), right.split(" ")[:3]
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        # In a container the mount shows a part of the tree, and the path may be that of the whole tree.
        root, top = fields[3].rstrip("/"), fields[4].rstrip("/")
        path = paths[kind].rstrip("/")
        folder = top + path[len(root) :] if path.startswith(root) else top
        while len(folder) >= len(top):
            yield folder
            folder = os.path.dirname(folder)


def _lines(path: str) -> list[str]:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read().splitlines()


def _field(path: str, name: str) -> int:
    found = next((line for line in _lines(path) if line.startswith(name)), "")
    return int(re.sub(r"\D", "", found[len(name) :]))
