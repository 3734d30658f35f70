"""Cases of very many small tensors, where the work for each tensor is all there is."""

import shutil

from benchmarks.case import Case, Goal, Job, Quantity, Samples
from benchmarks.sides import Side
from benchmarks.states import KIB, Tensors
from benchmarks.turns import load_turn, read_through, save_turn, take_turns

__all__ = ["small_cases"]

# What stock torch stores around each tensor, so that the space on disk is not underestimated.
_WRAP = 2 * KIB


def small_cases(scale: float) -> list[Case]:
    """The cases of this module."""
    small = Tensors(max(2, int(20_000 * scale)), (KIB,))
    tiny = Tensors(max(2, int(100_000 * scale)), (4,))
    return [
        _case(
            "small",
            f"{small.count:,} tensors of 4 KiB, page cache warm",
            small,
            {"save": Goal(times=15), "load": Goal(times=15)},
            rounds=3,
        ),
        _case(
            "tiny",
            f"{tiny.count:,} tensors of 16 bytes, page cache warm",
            tiny,
            {"save": None, "load": None, "save + load": Goal(times=20)},
            # A round of stock torch takes a minute and a half.
            rounds=1,
        ),
    ]


def _case(name: str, title: str, contents: Tensors, goals: dict[str, Goal | None], *, rounds: int) -> Case:
    def run(job: Job) -> Samples:
        state, target = contents.filled(), contents.blank()

        def act(side: Side) -> dict[str, float]:
            folder = job.folder / side.name
            save = save_turn(side, state, folder)
            read_through(folder)
            load = load_turn(side, contents, target, folder)
            shutil.rmtree(folder)
            measured = {"save": save, "load": load, "save + load": save + load}
            return {quantity: measured[quantity] for quantity in goals}

        return take_turns(job, act)

    quantities = tuple(Quantity(quantity, "s", goal) for quantity, goal in goals.items())
    disk = contents.nbytes + contents.count * _WRAP
    return Case(name, title, quantities, disk, rounds, run)
