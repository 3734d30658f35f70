"""Cases of unmodified frameworks: the same calls of a framework, on holdfast and on stock torch in turns."""

import importlib.util
from functools import partial

from benchmarks.case import Case, Goal, Job, Quantity, Samples, SkippedError
from benchmarks.ranks import RANKS, run_ranks
from benchmarks.states import MIB

__all__ = ["framework_cases"]

_CALLS = {
    "accelerate": "save_state and load_state of FSDP2",
    "lightning": "save and load of Fabric with ModelParallelStrategy",
    "torchtitan": "save and load of CheckpointManager",
    "transformers": "save_pretrained(distributed_checkpoint=True) and from_pretrained",
}


def framework_cases(scale: float) -> list[Case]:
    """The cases of this module."""
    nbytes = int(256 * MIB * scale)
    # No slower than stock torch, but for what two equal rounds differ by.
    goal = Goal(within=1.05)
    quantities = (Quantity("save", "s", goal), Quantity("load", "s", goal))
    return [
        Case(
            name,
            f"{calls}, {RANKS} ranks, about {nbytes / MIB:,.0f} MiB, page cache warm",
            quantities,
            2 * nbytes,
            5,
            partial(_run, name, nbytes),
        )
        for name, calls in _CALLS.items()
    ]


def _run(name: str, nbytes: int, job: Job) -> Samples:
    if importlib.util.find_spec(name) is None:
        raise SkippedError(f"{name} is not installed: use the environment of make frameworks")
    return run_ranks("benchmarks.framework_rank", name, nbytes, job)
