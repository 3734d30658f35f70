"""Cases of few large tensors: a durable save, a load from the page cache, a load from the disk."""

import shutil

from benchmarks.case import Case, Goal, Job, Quantity, Samples
from benchmarks.sides import Side, both_sides
from benchmarks.states import MIB, bulk
from benchmarks.turns import drop_caches, load_turn, read_through, save_turn, take_turns

__all__ = ["bulk_cases"]


def bulk_cases(scale: float) -> list[Case]:
    """The cases of this module."""
    contents = bulk(int(2048 * MIB * scale))
    size = f"{contents.nbytes / MIB:,.0f} MiB in {contents.count} tensors"

    def save(job: Job) -> Samples:
        state = contents.filled()

        def act(side: Side) -> dict[str, float]:
            folder = job.folder / side.name
            seconds = save_turn(side, state, folder)
            shutil.rmtree(folder)
            return {"save": seconds}

        return take_turns(job, act)

    def load(job: Job, *, cold: bool) -> Samples:
        target = contents.filled()
        for side in both_sides():
            side.save_anew(target, job.folder / side.name)

        def act(side: Side) -> dict[str, float]:
            folder = job.folder / side.name
            if cold:
                drop_caches()
            else:
                read_through(folder)
            return {"load": load_turn(side, contents, target, folder)}

        return take_turns(job, act)

    def load_hot(job: Job) -> Samples:
        return load(job, cold=False)

    def load_cold(job: Job) -> Samples:
        return load(job, cold=True)

    both = 2 * contents.nbytes
    return [
        Case("save", f"durable save, {size}", (_seconds("save", 2),), both, 5, save),
        Case("load-hot", f"load from the page cache, {size}", (_seconds("load", 4),), both, 5, load_hot),
        Case("load-cold", f"load from the disk, {size}", (_seconds("load", 2.3),), both, 5, load_cold),
    ]


def _seconds(name: str, times: float) -> Quantity:
    return Quantity(name, "s", Goal(times=times))
