"""Cases of two ranks on one host, which are processes that talk over gloo."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

from benchmarks.case import Case, Goal, Job, Quantity, Samples
from benchmarks.states import KIB, MIB, Tensors
from benchmarks.turns import drop_caches

__all__ = ["RANKS", "Layout", "RankCase", "rank_cases", "rank_contents", "run_ranks"]

RANKS = 2
Layout = Literal["whole", "rows", "columns"]
"""What a rank holds of a tensor: all of it, or its part of a DTensor with ``Shard(0)`` or ``Shard(1)``."""

DISK_READS = "bytes read from the disk per byte"


@dataclass(frozen=True)
class RankCase:
    """What the ranks of a case do.

    Attributes:
        contents: The whole tensors.
        saved: How the ranks hold them when they save.
        loaded: How the ranks hold them when they load.
        kind: Measure loads from the page cache, loads from the disk, or each save and load.
    """

    contents: Tensors
    saved: Layout
    loaded: Layout
    kind: Literal["hot", "cold", "both"]


_NOTES = {
    "ranks-replicas": "ranks are processes of one host; a time is that of the slowest",
    "ranks-replicas-cold": "the kernel counts the bytes that come from the disk (read_bytes in "
    "/proc/self/io), of all ranks, for each byte of the state",
}

_LARGE: dict[str, tuple[Layout, Layout, str, float]] = {
    "ranks-replicas": ("whole", "whole", "replicas, each rank loads all", 3.5),
    "ranks-columns": ("whole", "columns", "whole tensors, loaded as Shard(1)", 2.5),
    "ranks-reshard": ("rows", "columns", "saved as Shard(0), loaded as Shard(1)", 2.5),
}


def rank_contents(scale: float) -> dict[str, RankCase]:
    """By the name of the case: what its ranks do."""
    count = max(2, int(32 * scale))
    # An even number of rows, so that both ranks have a part.
    large = Tensors(count, (max(1, int(2048 * MIB * scale) // count // (8 * KIB)) * 2, KIB))
    small = Tensors(max(2, int(4000 * scale)), (2, KIB))
    cases = {"dtensors": RankCase(small, "rows", "rows", "both")}
    for name, (saved, loaded, _, _) in _LARGE.items():
        cases[name] = RankCase(large, saved, loaded, "hot")
        cases[f"{name}-cold"] = RankCase(large, saved, loaded, "cold")
    return cases


def rank_cases(scale: float) -> list[Case]:
    """The cases of this module."""
    contents = rank_contents(scale)
    small, large = contents["dtensors"].contents, contents["ranks-replicas"].contents
    size = f"{large.nbytes / MIB:,.0f} MiB in {large.count} tensors"
    cases = []
    for name, (_, _, words, times) in _LARGE.items():
        hot = (Quantity("load", "s", Goal(times=times)),)
        cold = (Quantity(DISK_READS, "bytes/byte", Goal(at_most=1.1)), Quantity("load", "s"))
        for case, where, quantities in ((name, "the page cache", hot), (f"{name}-cold", "the disk", cold)):
            title = f"{RANKS} ranks load from {where}, {size}: {words}"
            note = _NOTES.get(case, "")
            cases.append(Case(case, title, quantities, 2 * large.nbytes, 3, partial(_run, case, scale), note))
    goal = Goal(times=12)
    cases.append(
        Case(
            "dtensors",
            f"{small.count:,} DTensors of 8 KiB, Shard(0) over {RANKS} ranks, page cache warm",
            (Quantity("save", "s", goal), Quantity("load", "s", goal)),
            # Stock torch stores 2 KiB around each shard.
            small.nbytes + 2 * KIB * RANKS * small.count,
            5,
            partial(_run, "dtensors", scale),
        )
    )
    return cases


def _run(name: str, scale: float, job: Job) -> Samples:
    if rank_contents(scale)[name].kind == "cold":
        drop_caches()  # so that the case is skipped before anything is saved where that is impossible
    return run_ranks("benchmarks.rank", name, scale, job)


def run_ranks(module: str, name: str, size: float, job: Job) -> Samples:
    """Start the ranks of a case, each a process of ``module``; rank 0 writes the samples.

    If one fails, the others are ended.
    """
    command = [sys.executable, "-m", module, name, str(size), str(job.rounds), str(job.folder)]
    output = job.folder / "samples.json"
    ranks = [subprocess.Popen([*command, str(rank), str(output)]) for rank in range(RANKS)]
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.returncode for rank in ranks):
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    failed = [number for number, rank in enumerate(ranks) if rank.returncode]
    if failed:
        raise RuntimeError(f"rank {failed[0]} ended with status {ranks[failed[0]].returncode}")
    found: Samples = json.loads(output.read_bytes())
    return found
