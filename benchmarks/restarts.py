"""Cases in which every save and every load has a process of its own, as a job that is started anew has.

One compares holdfast with everybody on a fast disk, one holdfast with stock torch on a slow volume.
"""

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from benchmarks.apart import run_apart
from benchmarks.case import SIDES, Case, Goal, Job, Quantity, Samples, SkippedError, interleave
from benchmarks.cgroups import SlowVolume, slow_volume
from benchmarks.peers import PEERS, UNCHECKED, why_absent
from benchmarks.states import MIB, bulk
from benchmarks.turns import drop_caches, read_through

__all__ = ["restart_cases"]

_SAVE = "durable save"
_SAVED = "load of what was just saved"
_HOT = "hot load"
_HOT_UNCHECKED = "hot load, holdfast not checking"
_COLD = "cold load"
_SECOND = "second load"
_SPEED = 200_000_000
_SAFETENSORS = ("safetensors", "safetensors, safe_open")


def restart_cases(scale: float) -> list[Case]:
    """The cases of this module."""
    large, small = bulk(int(2048 * MIB * scale)), bulk(int(1024 * MIB * scale))
    goals = {
        _SAVE: None,
        _SAVED: Goal(times=3),
        _HOT: Goal(within=1.7, against=_SAFETENSORS),
        _HOT_UNCHECKED: Goal(within=1.2, against=_SAFETENSORS),
        _COLD: None,
        _SECOND: Goal(times=3),
    }
    slow_goals = {
        _SAVE: Goal(times=0.95),
        _SAVED: Goal(times=3),
        _COLD: Goal(times=0.95),
        _SECOND: Goal(times=3),
    }
    return [
        Case(
            "everybody",
            f"a new process for each save and load, {large.nbytes / MIB:,.0f} MiB in {large.count} tensors",
            _quantities(goals),
            large.nbytes,
            3,
            lambda job: _run_everybody(job, large.nbytes),
            "after a save returns, all files and folders of those that are not holdfast are synced on the "
            "clock; loads fill tensors that exist already, so what others return is copied into those on the "
            "clock; a second load follows a cold one, in another process; only holdfast compares checksums; "
            "plain files: one file, written, and read by 4 threads with 4 MiB a call, and nothing else",
        ),
        Case(
            "slow",
            f"a new process for each save and load, a volume of {_SPEED / 1e6:g} MB/s, "
            f"{small.nbytes / MIB:,.0f} MiB in {small.count} tensors",
            _quantities(slow_goals),
            small.nbytes,
            3,
            lambda job: _run_slow(job, small.nbytes),
            "the kernel limits the group of processes, for reading and for writing; the case is skipped if "
            "bytes went past that limit; a second load follows a cold one, in another process",
        ),
    ]


def _quantities(goals: Mapping[str, Goal | None]) -> tuple[Quantity, ...]:
    return tuple(Quantity(name, "s", goal) for name, goal in goals.items())


def _run_everybody(job: Job, nbytes: int) -> Samples:
    drop_caches()  # so that the case is skipped before the first save where that is impossible
    for side in PEERS:
        reason = why_absent(side, job.folder)
        if reason:
            job.absent[side] = reason

    def act(side: str) -> dict[str, float]:
        folder = job.folder / "checkpoint"
        found = {
            _SAVE: run_apart(side, "save", folder, nbytes),
            _SAVED: run_apart(side, "load", folder, nbytes),
        }
        read_through(folder)
        found[_HOT] = found[_HOT_UNCHECKED] = run_apart(side, "load", folder, nbytes)
        if side == SIDES[0]:
            found[_HOT_UNCHECKED] = run_apart(UNCHECKED, "load", folder, nbytes)
        found[_COLD] = run_apart(side, "cold", folder, nbytes)
        found[_SECOND] = run_apart(side, "load", folder, nbytes)
        return found

    return _take_turns(job, (*SIDES, *PEERS), act)


def _run_slow(job: Job, nbytes: int) -> Samples:
    drop_caches()
    with slow_volume(job.folder, _SPEED) as volume:

        def act(side: str) -> dict[str, float]:
            folder = job.folder / "checkpoint"
            with _under_the_limit(volume, "write", nbytes):
                save = run_apart(side, "save", folder, nbytes)
            saved = run_apart(side, "load", folder, nbytes)
            with _under_the_limit(volume, "read", nbytes):
                cold = run_apart(side, "cold", folder, nbytes)
            return {_SAVE: save, _SAVED: saved, _COLD: cold, _SECOND: run_apart(side, "load", folder, nbytes)}

        return _take_turns(job, SIDES, act)


def _take_turns(job: Job, sides: Sequence[str], act: Callable[[str], dict[str, float]]) -> Samples:
    def act_and_clean(side: str) -> dict[str, float]:
        if side in job.absent:
            return {}
        try:
            return act(side)
        except subprocess.CalledProcessError as error:
            if side in SIDES:
                raise
            # One of the others that fails takes no figures from the rest.
            job.absent[side] = f"a process of it ended with status {error.returncode}"
            return {}
        finally:
            shutil.rmtree(job.folder / "checkpoint", ignore_errors=True)

    samples = interleave(sides, act_and_clean, rounds=job.rounds, name_of=str, say=job.say)
    return {
        quantity: {side: numbers for side, numbers in of_sides.items() if side not in job.absent}
        for quantity, of_sides in samples.items()
    }


@contextmanager
def _under_the_limit(volume: SlowVolume, way: Literal["read", "write"], nbytes: int) -> Iterator[None]:
    """See afterwards that the kernel counted the bytes: what it writes back by itself it may not limit."""
    before = volume.moved(way)
    yield
    moved = volume.moved(way) - before
    if moved < 0.9 * nbytes:
        raise SkippedError(f"only {moved / nbytes:.0%} of the bytes passed the limit ({way})")
