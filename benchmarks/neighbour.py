"""The case of another process's files: how many of their pages a save pushes out of the page cache.

``python -m benchmarks.neighbour FOLDER`` is that process: it reads all files of a folder twice, so that the
kernel takes them for files in use.
"""

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.apart import run_apart
from benchmarks.case import SIDES, Case, Goal, Job, Quantity, Samples, SkippedError, interleave
from benchmarks.cgroups import limited_memory
from benchmarks.states import MIB, bulk
from benchmarks.turns import read_through

__all__ = ["cached_share", "neighbour_cases"]

_FILES = 4
_REST = 1024 * MIB
"""What the limit leaves besides the state and the files: for the processes themselves, at every scale."""


def neighbour_cases(scale: float) -> list[Case]:
    """The cases of this module."""
    contents, hot = bulk(int(2048 * MIB * scale)), int(4096 * MIB * scale)
    limit = contents.nbytes + hot + _REST
    return [
        Case(
            "neighbour",
            f"pages of another process that a save of {contents.nbytes / MIB:,.0f} MiB pushes out: "
            f"{hot / MIB:,.0f} MiB of files in use, memory limited to {limit / MIB:,.0f} MiB",
            (Quantity("pages pushed out per page", "pages/page", Goal(at_most=0.1)),),
            hot + contents.nbytes,
            3,
            lambda job: _run(job, contents.nbytes, hot, limit),
            "a process reads its files twice, then another process saves; both are in one group whose memory "
            "and page cache the kernel limits, and which the state is in too",
        )
    ]


def _run(job: Job, nbytes: int, hot: int, limit: int) -> Samples:
    files = job.folder / "files"
    files.mkdir()
    block = bytes(MIB)
    for number in range(_FILES):
        with (files / str(number)).open("wb") as file:
            for _ in range(max(1, hot // _FILES // MIB)):
                file.write(block)

    def act(side: str) -> dict[str, float]:
        # Pages belong to the group whose process reads them first, so they leave the page cache before.
        for path in files.iterdir():
            _forget(path)
        subprocess.run([sys.executable, "-m", "benchmarks.neighbour", str(files)], check=True)
        before, drops = cached_share(files), _cache_drops()
        run_apart(side, "save", job.folder / "checkpoint", nbytes)
        after = cached_share(files)
        shutil.rmtree(job.folder / "checkpoint")
        if _cache_drops() != drops:
            raise SkippedError("somebody else made the page cache forget all files meanwhile")
        return {"pages pushed out per page": max(0.0, 1 - after / before)}

    with limited_memory(limit):
        return interleave(SIDES, act, rounds=job.rounds, name_of=str, say=job.say)


def cached_share(folder: Path) -> float:
    """How much of the files of a folder is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    cached = total = 0
    for path in folder.iterdir():
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
            pages = (ctypes.c_ubyte * -(-len(memory) // mmap.PAGESIZE))()
            view = ctypes.c_char.from_buffer(memory)
            failed = libc.mincore(
                ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(len(memory)), pages
            )
            del view  # or the mapping cannot be closed
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
        cached += sum(page & 1 for page in bytes(pages))
        total += len(pages)
    return cached / total


def _cache_drops() -> int:
    """How often somebody has let the page cache forget all files, since the machine started."""
    lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("drop_pagecache ")), 0)


def _forget(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    for _ in range(2):
        read_through(Path(sys.argv[1]))
