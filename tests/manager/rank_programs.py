"""What the ranks of the tests of managers do."""

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from holdfast.manager import CheckpointManager, EverySeconds, EverySteps, Last, Preempted


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(step)), "step": step}


def train_until_preempted(root: str, signalled: int, lock_step: bool) -> tuple[int, list[int]]:
    """Train for ever; one rank gets SIGTERM. Returns the last step, and what is in the root."""
    rank = dist.get_rank()
    with CheckpointManager(root, keep=Last(2), when=EverySteps(1000) | Preempted()) as manager:
        step = 0
        while True:
            step += 1
            if rank == signalled and step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.002 * (1 + rank))
            if lock_step:
                dist.all_reduce(torch.ones(1))
            if manager.should_save(step):
                manager.async_save(step, state_of(step))
            if manager.should_stop:
                break
        manager.wait()
        return step, manager.steps()


def evaluate_until_preempted(root: str) -> tuple[int, list[int]]:
    """All ranks are in a loop without steps when rank 2 gets SIGTERM."""
    with CheckpointManager(root, when=Preempted()) as manager:
        manager.should_save(7)
        batches = 0
        while not manager.poll():
            batches += 1
            dist.all_reduce(torch.ones(1))
            if dist.get_rank() == 2 and batches == 3:
                os.kill(os.getpid(), signal.SIGTERM)
        assert manager.should_stop
        assert manager.should_save(8)
        manager.save(8, state_of(8))
        return batches, manager.steps()


def save_by_time(root: str) -> list[int]:
    """Only the clock of rank 0 counts; all ranks save the same steps."""
    saved = []
    with CheckpointManager(root, when=EverySeconds(0.2 if dist.get_rank() == 0 else 1e6)) as manager:
        for step in range(10_000):
            dist.all_reduce(torch.ones(1))
            if manager.should_save(step):
                manager.save(step, state_of(step))
                saved.append(step)
            if len(saved) == 2:
                break
    return saved


def restore_damaged(root: str) -> tuple[int, list[int], float, int]:
    """Three ranks restore; the newest step is damaged."""
    state: dict[str, Any] = {"w": torch.zeros(1000), "step": -1}
    with CheckpointManager(root) as manager:
        restored = manager.restore(state)
        assert restored is not None
        return restored.step, list(restored.skipped), float(state["w"][0]), state["step"]


def save_steps(root: str, steps: list[int]) -> list[int]:
    with CheckpointManager(root, keep=Last(2)) as manager:
        for step in steps:
            manager.save(step, state_of(step), metrics={"loss": 1.0 / (1 + step)})
        manager.wait()
        return manager.steps()
