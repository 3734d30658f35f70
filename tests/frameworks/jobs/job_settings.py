"""What the jobs of all frameworks share: settings, a model, data that depend on the step, a kill."""

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

SETTINGS = SimpleNamespace(
    **{
        "folder": "",  # where the job saves to
        "resume": False,  # load from there first
        "steps": 2,  # how many steps to train before the save
        "kill_at": 0,  # kill rank 0 in an overwrite, at this call that changes the file system
        "in_background": False,
        "export": "",  # write the model as one file, into this folder
        "plain": False,  # checkpoints that are not sharded
        **json.loads(sys.argv[1]),
    }
)
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))


def batch(step: int) -> torch.Tensor:
    """This rank's rows of the batch of a step."""
    made = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    return made.chunk(WORLD)[RANK]


def watch_for_kill() -> None:
    """Let rank 0 die at the given call from here on."""
    if SETTINGS.kill_at and RANK == 0:
        from tests.support.kills import Killer

        Killer(SETTINGS.kill_at, os.open(os.devnull, os.O_WRONLY))


def tell(losses: list[float], **facts: Any) -> None:
    """Say how it went, summed over the ranks."""
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    if RANK == 0:
        print("RESULT", json.dumps({"losses": (mean / WORLD).tolist(), **facts}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
