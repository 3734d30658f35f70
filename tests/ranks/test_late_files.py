"""A rank that makes files when the save has failed elsewhere, and is killed: the next save removes them."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import run_ranks

import holdfast as hf
from holdfast.errors import CheckpointException

pytestmark = pytest.mark.slow


class Fails(hf.DefaultSavePlanner):
    """A planner that fails before anything is written."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def finish_plan(self, new_plan: Any) -> Any:
        raise self.error


class WritesLate(hf.FileSystemWriter):
    """A writer that begins when the save has failed elsewhere, and is killed when its files are there."""

    def __init__(self, folder: Path, has_failed: Any) -> None:
        super().__init__(folder)
        self.has_failed = has_failed

    def write_data(self, plan: Any, planner: Any) -> Any:
        os.read(self.has_failed, 1)
        super().write_data(plan, planner)
        os.kill(os.getpid(), signal.SIGKILL)


def save_again_after_a_failure(folder: Path, failing: int, error: BaseException) -> list[str] | None:
    """The files after the next save, on rank 0; the last rank is killed."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    told, alive = None, None
    writer = hf.FileSystemWriter(folder / "checkpoint")
    if rank == last:
        writer = WritesLate(folder / "checkpoint", os.open(folder / "told", os.O_RDONLY))
        os.open(folder / "alive", os.O_WRONLY)  # closed by its death
    elif rank == 0:
        told = os.open(folder / "told", os.O_WRONLY)
        alive = os.open(folder / "alive", os.O_RDONLY)
    planner = Fails(error) if rank == failing else hf.DefaultSavePlanner()
    state = {f"of rank {rank}": torch.ones(100) * rank}
    with pytest.raises((CheckpointException, KeyboardInterrupt)):
        hf.save(state, storage_writer=writer, planner=planner, peer_timeout=1)
    if told is None or alive is None:
        return None
    os.write(told, b"!")
    assert os.read(alive, 1) == b""
    hf.save({"a": torch.ones(3)}, checkpoint_id=folder / "checkpoint", no_dist=True)
    return sorted(os.listdir(folder / "checkpoint"))


@pytest.mark.parametrize(
    ("world_size", "failing", "error"),
    [(2, 0, KeyboardInterrupt()), (3, 0, OSError(5, "on purpose")), (3, 1, OSError(5, "on purpose"))],
    ids=["the coordinator is interrupted", "the coordinator fails", "another rank fails"],
)
def test_files_that_a_rank_makes_after_the_failure_go_with_the_next_save(
    tmp_path: Path, world_size: int, failing: int, error: BaseException
) -> None:
    for name in ("told", "alive"):
        os.mkfifo(tmp_path / name)
    ranks = run_ranks(save_again_after_a_failure, world_size, tmp_path, failing, error, timeout=60)
    metadata, data = ranks[0][1]
    assert metadata == ".metadata"
    assert data.startswith("__0_0-")
