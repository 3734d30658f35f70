"""What the command line costs: listing very many tensors, and reading every byte of a checkpoint."""

import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import holdfast
from benchmarks.case import Case, Goal, Job, Quantity, Samples
from benchmarks.states import KIB, Tensors
from benchmarks.turns import drop_caches

__all__ = ["command_cases"]

_DISK = "plain reads"
_STEP = 8 << 20
_THREADS = 4


def command_cases(scale: float) -> list[Case]:
    """The cases of this module."""
    many = Tensors(max(2, int(100_000 * scale)), (4,))
    large = Tensors(max(1, int(256 * scale)), (2048 * KIB,))
    goal = Goal(at_most=1)
    return [
        Case(
            "ls",
            f"`holdfast ls` of {many.count:,} tensors, the start of Python included",
            (Quantity("ours", "s", goal), Quantity("safetensors", "s", goal)),
            many.count * KIB,
            5,
            lambda job: _list(job, many),
        ),
        Case(
            "verify",
            f"what `holdfast verify` does with {large.nbytes >> 20} MiB, page cache cold",
            (Quantity("read and compare", "s", Goal(within=1.25, against=(_DISK,))),),
            large.nbytes,
            5,
            lambda job: _verify(job, large),
            note=f"{_DISK}: {_THREADS} threads read the same files past the page cache, and compare nothing",
        ),
    ]


def _list(job: Job, contents: Tensors) -> Samples:
    holdfast.save(contents.filled(), checkpoint_id=job.folder / "ours", no_dist=True)
    holdfast.convert(job.folder / "ours", job.folder / "safetensors", to="safetensors")
    job.absent["torch"] = "has no such command"
    samples: Samples = {"ours": {"holdfast": []}, "safetensors": {"holdfast": []}}
    for _ in range(job.rounds):
        for kind, taken in samples.items():
            taken["holdfast"].append(_seconds_of_ls(job.folder / kind))
        job.say(", ".join(f"{kind} {taken['holdfast'][-1]:.2f} s" for kind, taken in samples.items()))
    return samples


def _verify(job: Job, contents: Tensors) -> Samples:
    folder = job.folder / "checkpoint"
    holdfast.save(contents.filled(), checkpoint_id=folder, no_dist=True)
    job.absent["torch"] = "has no such command"
    seconds: dict[str, list[float]] = {"holdfast": [], _DISK: []}
    for _ in range(job.rounds):
        # Not as a command: the caches that are dropped are those of Python's modules as well.
        for side, work in (("holdfast", _check), (_DISK, _read_plainly)):
            drop_caches()
            began = time.perf_counter()
            work(folder)
            seconds[side].append(time.perf_counter() - began)
        job.say(", ".join(f"{side} {taken[-1]:.2f} s" for side, taken in seconds.items()))
    return {"read and compare": seconds}


def _seconds_of_ls(path: Path) -> float:
    words = [sys.executable, "-m", "holdfast.cli", "ls", str(path)]
    began = time.perf_counter()
    subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def _check(folder: Path) -> None:
    with holdfast.open(folder) as view:
        found = view.verify()
    if found.damages or not found.checked_nbytes:
        raise RuntimeError(f"{folder} was written just now, and is damaged: {found}")


def _read_plainly(folder: Path) -> None:
    """Read all files of a folder past the page cache, as fast as the disk gives them."""
    ranges = [
        (path, begin) for path in sorted(folder.iterdir()) for begin in range(0, path.stat().st_size, _STEP)
    ]
    lock = threading.Lock()

    def work() -> None:
        buffer = mmap.mmap(-1, _STEP)  # its place in memory is a multiple of what the disk wants
        while True:
            with lock:
                if not ranges:
                    return
                path, begin = ranges.pop(0)
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
            os.preadv(file, [buffer], begin)
            os.close(file)

    threads = [threading.Thread(target=work) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
