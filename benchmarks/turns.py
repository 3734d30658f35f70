"""One turn of one side: what is made ready before the clock runs, and checked after it has stopped."""

import gc
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.case import Job, Samples, SkippedError, interleave
from benchmarks.sides import Side, both_sides
from benchmarks.states import State

__all__ = ["drop_caches", "load_turn", "read_through", "save_turn", "seconds_of", "take_turns"]


def seconds_of(work: Callable[[], object], begin: Callable[[], object] = lambda: None) -> float:
    """How long ``work`` takes, with the garbage of others collected and their writes on disk beforehand.

    ``begin`` is called just before, and not measured: ranks wait for each other in it.
    """
    gc.collect()
    os.sync()
    begin()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def save_turn(side: Side, state: dict[str, Any], folder: Path) -> float:
    """Seconds of a save into ``folder``, which does not exist before."""
    return seconds_of(lambda: side.save(state, folder))


def load_turn(side: Side, contents: State, target: dict[str, Any], folder: Path) -> float:
    """Seconds of a load into ``target``, whose memory is touched before and compared after."""
    contents.clear(target)
    seconds = seconds_of(lambda: side.load(target, folder))
    contents.check(target)
    return seconds


def take_turns(job: Job, act: Callable[[Side], Mapping[str, float]], *, zstd: bool = False) -> Samples:
    """Warm both sides up, then let them take turns."""
    sides = both_sides(zstd=zstd)
    for side in sides:
        side.warm_up(job.folder)
    return interleave(sides, act, rounds=job.rounds, name_of=lambda side: side.name, say=job.say)


def read_through(folder: Path) -> None:
    """Bring every file in a folder into the page cache; a save may have gone past it."""
    buffer = bytearray(1 << 20)
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop_caches() -> None:
    """Let the page cache forget all files. Raises SkippedError where this process may not ask for that."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
    except OSError as error:
        raise SkippedError(f"caches cannot be dropped: {error}") from error
