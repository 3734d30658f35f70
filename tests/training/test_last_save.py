"""A job ends right after its last save: no rank takes the end of another for a failure of that save."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import run_ranks

import holdfast

pytestmark = pytest.mark.slow
_waiting: list[subprocess.Popen[bytes]] = []


class StopsTheOther(holdfast.FileSystemWriter):
    """Stops another process before the commit, so that it hears of the commit only when it is continued."""

    other = 0

    def finish(self, metadata: holdfast.Metadata, results: list[Any]) -> None:
        os.kill(self.other, signal.SIGSTOP)
        super().finish(metadata, results)


def save_and_leave(folder: Path) -> bool:
    numbers: list[Any] = [None, None]
    dist.all_gather_object(numbers, os.getpid())
    writer = holdfast.FileSystemWriter(folder)
    if dist.get_rank() == 0:
        writer = StopsTheOther(folder)
        writer.other = numbers[1]
        # It waits for the end of its input, which is the end of this process, to continue the other one.
        command = ["sh", "-c", f"read _; kill -CONT {numbers[1]}"]
        _waiting.append(subprocess.Popen(command, stdin=subprocess.PIPE))
    holdfast.save({"x": torch.ones(3)}, storage_writer=writer)
    return True


def test_a_rank_learns_of_the_commit_although_the_coordinator_has_ended_meanwhile(tmp_path: Path) -> None:
    assert run_ranks(save_and_leave, 2, tmp_path) == [("returned", True), ("returned", True)]
