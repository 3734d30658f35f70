"""Cases of staging: for how long training stops when a state is copied for a save in the background."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint import staging as stock

from benchmarks.case import SIDES, Case, Goal, Job, Quantity, Samples, interleave
from benchmarks.states import KIB, MIB, Tensors, bulk
from benchmarks.turns import seconds_of
from holdfast.staging import DefaultStager, StagingOptions

__all__ = ["staging_cases"]

_PER_MEMCPY = "by one memcpy"


def staging_cases(scale: float) -> list[Case]:
    """The cases of this module."""
    large = bulk(int(2048 * MIB * scale))
    small = Tensors(max(2, int(20_000 * scale)), (KIB,))
    size = f"{large.nbytes / MIB:,.0f} MiB in {large.count} tensors"
    # Nothing is written; the number keeps the runner's sum of what a case needs above zero.
    return [
        Case(
            "staging",
            f"second staging, {size}",
            (Quantity("stall", "s", Goal(times=3)), Quantity(_PER_MEMCPY, "bytes/byte", Goal(at_most=1.2))),
            large.nbytes,
            5,
            lambda job: _run(job, large, by_memcpy=True),
            "torch's stager is a new one for each save, as async_save makes it; the second quantity is how "
            "many bytes one memcpy into touched memory copies in the time, for each byte that is staged",
        ),
        Case(
            "staging-small",
            f"second staging, {small.count:,} tensors of 4 KiB",
            (Quantity("stall", "s"),),
            small.nbytes,
            5,
            lambda job: _run(job, small, by_memcpy=False),
        ),
    ]


def _run(job: Job, contents: Tensors, *, by_memcpy: bool) -> Samples:
    state = contents.filled()
    ours = DefaultStager(StagingOptions(use_async_staging=False))
    stages: dict[str, Callable[[], Any]] = {
        "holdfast": lambda: ours.stage(state),
        "torch": lambda: _stage_by_torch(state),
    }
    for side in SIDES:
        contents.check(stages[side]())
    memcpy = _memcpy_of(contents.nbytes) if by_memcpy else None

    def act(side: str) -> dict[str, float]:
        stall = seconds_of(stages[side])
        return {"stall": stall, _PER_MEMCPY: stall / seconds_of(memcpy)} if memcpy else {"stall": stall}

    samples = interleave(SIDES, act, rounds=job.rounds, name_of=str, say=job.say)
    ours.close()
    return samples


def _stage_by_torch(state: dict[str, Any]) -> Any:
    options = stock.StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    stager = stock.DefaultStager(options)
    staged = stager.stage(state)
    stager.close()
    return staged


def _memcpy_of(nbytes: int) -> Callable[[], object]:
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8).fill_(2)
    return lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)
