"""What a manager costs a program that has saved 1,000 steps, and a training step between two saves."""

import shutil
import time

import torch

from benchmarks.case import Case, Goal, Job, Quantity, Samples
from holdfast.manager import CheckpointManager, Last

__all__ = ["thousand_steps_cases"]

_OPEN, _IDLE = "open a manager", "a million times updating(), no save under way"
_CALLS = 10_000


def thousand_steps_cases(scale: float) -> list[Case]:
    """The cases of this module."""
    count = max(2, int(1000 * scale))
    quantities = (Quantity(_OPEN, "s", Goal(at_most=0.05)), Quantity(_IDLE, "s", Goal(at_most=5)))

    def run(job: Job) -> Samples:
        with CheckpointManager(job.folder, no_dist=True) as manager:
            manager.save(0, {"w": torch.ones(4)}, metrics={"loss": 1.0})
        for step in range(1, count):
            shutil.copytree(job.folder / "step-0", job.folder / f"step-{step}")
        samples: Samples = {_OPEN: {"holdfast": []}, _IDLE: {"holdfast": []}}
        job.absent["torch"] = "has no manager"
        for _ in range(job.rounds):
            began = time.perf_counter()
            manager = CheckpointManager(job.folder, keep=Last(3), no_dist=True)
            samples[_OPEN]["holdfast"].append(time.perf_counter() - began)
            began = time.perf_counter()
            for _ in range(_CALLS):
                with manager.updating():
                    pass
            samples[_IDLE]["holdfast"].append((time.perf_counter() - began) / _CALLS * 1e6)
            job.say(f"{1e3 * samples[_OPEN]['holdfast'][-1]:.1f} ms to open")
        return samples

    return [Case("steps", f"a run of {count:,} steps, page cache warm", quantities, count * 16384, 9, run)]
