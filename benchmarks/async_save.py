"""Cases of saves in the background: how much time of training each of them takes."""

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
_LOOPS = ("Python", "matmul")


def async_save_cases(scale: float) -> list[Case]:
    """The cases of this module."""
    contents = bulk(int(2048 * MIB * scale))
    seconds = _SECONDS * min(scale, 1)
    size = f"{contents.nbytes / MIB:,.0f} MiB in {contents.count} tensors"

    def quantities(durable: dict[str, Goal]) -> tuple[Quantity, ...]:
        lost = [Quantity(_lost(name), "s", Goal(times=3, typically=True)) for name in _LOOPS]
        after = [Quantity(_durable(name), "s", durable.get(name)) for name in _LOOPS]
        return Quantity(_STALL, "s", Goal(times=3)), *lost, *after

    note = (
        "the second and later saves; training is one thread of Python or of matmul; the time that it loses "
        "by a save is the stall + (slowdown - 1) x the time until it is durable; the slowdown is how many "
        "times as long its work takes during that time as in the second before and the second after; a round "
        f"has as many saves as take {seconds:g} s, with the median of their stalls and of those times"
    )
    return [
        Case(
            "async-save",
            f"save in the background by a thread, {size}",
            quantities({"Python": Goal(times=2, typically=True)}),
            2 * contents.nbytes,
            7,
            lambda job: _run(job, contents.filled(), "thread", seconds),
            note,
        ),
        Case(
            "async-save-process",
            f"save in the background by a process, {size}",
            quantities({}),
            2 * contents.nbytes,
            7,
            lambda job: _run(job, contents.filled(), "process", seconds),
            note,
        ),
    ]


def _lost(loop: str) -> str:
    return f"training time lost by a save, {loop}"


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
        all_stalls = []
        for name, unit in loops.items():
            alone, beside, durable, stalls = _Work(unit), _Work(unit), [], []
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
            all_stalls += stalls
            measured[_durable(name)] = statistics.median(durable)
            # The machine's noise may make a loop quicker beside a save than alone: no time is won by that.
            slower = max(0.0, alone.rate / beside.rate - 1)
            measured[_lost(name)] = statistics.median(stalls) + slower * measured[_durable(name)]
        return {_STALL: statistics.median(all_stalls), **measured}

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
