"""Pre-emption of a job whose data comes from worker processes, all of which get the signal."""

import os
import signal
from pathlib import Path

import pytest
import torch
from tests.support.ranks import rank_processes
from torch.utils.data import DataLoader, Dataset

from holdfast.manager import CheckpointManager, Preempted, ignore_preemption


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def train(root: str) -> list[int]:
    """The signal comes early, and the boundary at which ranks agree to save is many batches later."""
    os.setsid()
    with CheckpointManager(root, when=Preempted()) as manager:
        for step, batch in enumerate(DataLoader(Numbers(), num_workers=1, multiprocessing_context="fork")):
            if step == 5:
                os.killpg(0, signal.SIGTERM)
            if step < 200:
                continue
            if manager.should_save(step):
                manager.save(step, {"batch": batch})
            if manager.should_stop:
                break
    return manager.steps()


@pytest.mark.slow
def test_workers_of_a_data_loader_outlive_the_signal_until_the_save(tmp_path: Path) -> None:
    (found,) = rank_processes().run(train, 1, str(tmp_path))
    assert (found.kind, found.value) == ("returned", [200]), found


def test_a_spawned_worker_ignores_the_signal_once() -> None:
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        ignore_preemption(0)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            os.write(told, b"alive")
        os._exit(0)
    os.close(told)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM
    assert os.read(ready, 100) == b"alive"
    os.close(ready)
