"""The case of one rank out of eight that loads its eighth of a tensor: what it reads, and how long."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.case import Case, Goal, Job, Quantity, Samples
from benchmarks.rank import bytes_counted
from benchmarks.sides import Side, both_sides
from benchmarks.states import KIB, MIB, Tensors
from benchmarks.turns import read_through, seconds_of, take_turns

__all__ = ["RANK", "RANKS", "shard_of_rank", "slice_cases"]

RANKS = 8
RANK = 3


def slice_cases(scale: float) -> list[Case]:
    """The cases of this module."""
    rows = max(RANKS, int(256 * KIB * scale)) // RANKS * RANKS
    contents = Tensors(1, (rows, KIB))
    quantities = (
        Quantity("bytes read per byte needed", "bytes/byte", Goal(at_most=1.05)),
        Quantity("load", "s"),
    )

    def run(job: Job) -> Samples:
        state = contents.filled()
        (key,) = state
        for side in both_sides():
            side.save_anew(state, job.folder / side.name)
        expected = state[key].chunk(RANKS)[RANK]
        local = torch.empty_like(expected)
        target = {key: shard_of_rank(local)}

        def act(side: Side) -> dict[str, float]:
            folder = job.folder / side.name
            read_through(folder)
            local.zero_()
            before = bytes_counted("rchar")
            seconds = seconds_of(lambda: side.load(target, folder))
            read = bytes_counted("rchar") - before
            assert torch.equal(local.view(torch.int32), expected.view(torch.int32)), "wrong values"
            return {"bytes read per byte needed": read / local.nbytes, "load": seconds}

        return take_turns(job, act)

    return [
        Case(
            "slice",
            f"rows of rank {RANK} of {RANKS}, Shard(0), out of one tensor of "
            f"{contents.nbytes / MIB:,.0f} MiB, page cache warm",
            quantities,
            2 * contents.nbytes,
            5,
            run,
            "the kernel counts the bytes (rchar in /proc/self/io): all that the process read, metadata too",
        )
    ]


def shard_of_rank(local: torch.Tensor) -> DTensor:
    """``local`` as this rank's part of a tensor over eight ranks, seven of which do not exist.

    Neither side talks to the others when it loads alone, so torch's own stand-in for a group serves.
    """
    # The import registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    mesh = init_device_mesh("cpu", (RANKS,))
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
