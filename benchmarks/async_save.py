"""Cases of saves in the background: how long the call takes, and how much slower training is beside it."""

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver as stock

from benchmarks.case import SIDES, Case, Goal, Job, Quantity, Samples, interleave
from benchmarks.states import MIB, bulk
from benchmarks.turns import seconds_of
from holdfast import state_dict_saver as ours

__all__ = ["async_save_cases"]

_STALL = "stall"
_SECONDS = 6.0
"""What a loop is measured for beside saves in each round: less is decided by the noise of the machine."""
_LOOPS = {"Python": "1 s of Python beside it", "matmul": "1 s of matmul beside it"}


def async_save_cases(scale: float) -> list[Case]:
    """The cases of this module."""
    contents = bulk(int(2048 * MIB * scale))
    seconds = _SECONDS * min(scale, 1)
    size = f"{contents.nbytes / MIB:,.0f} MiB in {contents.count} tensors"

    def quantities(at_most: float) -> tuple[Quantity, ...]:
        loops = [Quantity(name, "s", Goal(at_most=at_most, typically=True)) for name in _LOOPS.values()]
        durable = [Quantity(_durable(name), "s") for name in _LOOPS]
        return Quantity(_STALL, "s", Goal(times=3)), *loops, *durable

    note = (
        "the second and later saves; work that takes one second alone (in the second before and the second "
        "after each save), one thread of it, measured from the return of the call until the save is durable; "
        f"as many saves in a round as take {seconds:g} s, with the median of their stalls and of the times "
        "after which they were durable"
    )
    return [
        Case(
            "async-save",
            f"save in the background by a thread, {size}",
            quantities(1.15),
            2 * contents.nbytes,
            7,
            lambda job: _run(job, contents.filled(), "thread", seconds),
            note,
        ),
        Case(
            "async-save-process",
            f"save in the background by a process, {size}",
            quantities(1.05),
            2 * contents.nbytes,
            7,
            lambda job: _run(job, contents.filled(), "process", seconds),
            note,
        ),
    ]


def _durable(loop: str) -> str:
    return f"durable after, beside {loop}"


def _count_in_python() -> None:
    total = 0
    for number in range(2000):
        total += number * number


def _multiply() -> Callable[[], object]:
    left, right = torch.ones(256, 256), torch.ones(256, 256)
    return lambda: torch.mm(left, right)


def _run(job: Job, state: dict[str, Any], kind: str, seconds: float) -> Samples:
    loops: dict[str, Callable[[], object]] = {"Python": _count_in_python, "matmul": _multiply()}
    starts: dict[str, Callable[[Path], Any]] = {
        "holdfast": lambda folder: ours.async_save(
            state,
            checkpoint_id=folder,
            no_dist=True,
            async_checkpointer_type=ours.AsyncCheckpointerType(kind),
        ),
        "torch": lambda folder: stock.async_save(
            state,
            checkpoint_id=folder,
            no_dist=True,
            async_checkpointer_type=stock.AsyncCheckpointerType(kind),
        ),
    }
    if not dist.is_initialized():
        # Stock torch does not save by a process without one.
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    for side in SIDES:
        # So that imports, buffers and processes are there.
        starts[side](job.folder / side).result()

    def act(side: str) -> dict[str, float]:
        measured: dict[str, float] = {}
        stalls = []
        for name, unit in loops.items():
            alone, beside, durable = _Work(unit), _Work(unit), []
            while beside.seconds < seconds:
                shutil.rmtree(job.folder / side)
                alone.go_on(_Clock(1.0).is_over)
                started = _Started(starts[side])
                stalls.append(
                    seconds_of(lambda started=started: started.start(job.folder / side))  # type: ignore[misc]
                )
                durable.append(beside.go_on(started.future.done))
                started.future.result()
                alone.go_on(_Clock(1.0).is_over)
            measured[_durable(name)] = statistics.median(durable)
            measured[_LOOPS[name]] = alone.rate / beside.rate
        return {_STALL: statistics.median(stalls), **measured}

    return interleave(SIDES, act, rounds=job.rounds, name_of=str, say=job.say)


class _Started:
    """A save that has begun."""

    def __init__(self, begin: Callable[[Path], Any]) -> None:
        self._begin = begin
        self.future: Any = None

    def start(self, folder: Path) -> None:
        self.future = self._begin(folder)


class _Clock:
    """Is over after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    def is_over(self) -> bool:
        return time.perf_counter() > self._end


class _Work:
    """What one thread has done of some work, in pieces.

    Attributes:
        seconds: How long that took.
        rate: Units a second.
    """

    def __init__(self, unit: Callable[[], object]) -> None:
        self._unit = unit
        self._count = 0
        self.seconds = 0.0

    @property
    def rate(self) -> float:
        return self._count / self.seconds

    def go_on(self, is_over: Callable[[], bool]) -> float:
        """Work until it is over, but for one unit at least; returns the seconds."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        unit, count, start = self._unit, 0, time.perf_counter()
        while not is_over() or not count:
            unit()
            count += 1
        seconds = time.perf_counter() - start
        torch.set_num_threads(threads)
        self._count += count
        self.seconds += seconds
        return seconds
