"""The case of two ranks with thousands of small DTensors, as FSDP2 shards the parameters of a model."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.case import Case, Goal, Job, Quantity, Samples, interleave
from benchmarks.sides import Side, both_sides
from benchmarks.states import KIB, Tensors
from benchmarks.turns import read_through, seconds_of

__all__ = ["dtensor_cases"]

_RANKS = 2
# What stock torch stores around each shard, so that the space on disk is not underestimated.
_WRAP = 2 * KIB


def dtensor_cases(scale: float) -> list[Case]:
    """The cases of this module."""
    count = max(2, int(4000 * scale))

    def run(job: Job) -> Samples:
        mp.spawn(_be_a_rank, (str(job.folder), job.rounds, count), nprocs=_RANKS)  # type: ignore[attr-defined,no-untyped-call]
        return msgspec.json.decode((job.folder / "samples").read_bytes(), type=Samples)

    return [
        Case(
            "dtensors",
            f"{count:,} DTensors of 8 KiB, Shard(0) over {_RANKS} ranks, page cache warm",
            (Quantity("save", "s", Goal(times=12)), Quantity("load", "s", Goal(times=12))),
            _RANKS * count * (4 * KIB + _WRAP),
            5,
            run,
            "the ranks are processes on this machine, over gloo; a figure is that of the slower rank",
        )
    ]


def _be_a_rank(rank: int, folder_name: str, rounds: int, count: int) -> None:
    """One of the ranks: takes turns with the others, and writes the samples if it is the first."""
    folder = Path(folder_name)
    store = dist.FileStore(str(folder / "ranks"), _RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_RANKS)
    shards = Tensors(count, (KIB,))
    values, memory = shards.filled(), shards.blank()
    for value in values.values():
        # Each rank has values of its own, so that a shard of the other one is seen.
        value.view(torch.int32).add_(rank)
    state, target = _sharded(values), _sharded(memory)
    sides = both_sides(together=True)
    for side in sides:
        side.save({"x": torch.ones(4)}, folder / f"warm-up-{side.name}")
        side.load({"x": torch.zeros(4)}, folder / f"warm-up-{side.name}")

    def act(side: Side) -> dict[str, float]:
        place = folder / side.name
        save = _slowest_of(lambda: side.save(state, place))
        read_through(place)
        shards.clear(memory)
        load = _slowest_of(lambda: side.load(target, place))
        for loaded in memory.values():
            loaded.view(torch.int32).sub_(rank)
        shards.check(memory)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(place)
        return {"save": save, "load": load}

    def say(line: str) -> None:
        if rank == 0:
            print(f"  dtensors: {line}", file=sys.stderr, flush=True)

    samples = interleave(sides, act, rounds=rounds, name_of=lambda side: side.name, say=say)
    if rank == 0:
        (folder / "samples").write_bytes(msgspec.json.encode(samples))
    dist.destroy_process_group()


def _slowest_of(work: Callable[[], object]) -> float:
    """How long the slowest rank takes for its part; all begin together."""
    seconds = torch.tensor(seconds_of(work, dist.barrier))
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _sharded(shards: dict[str, torch.Tensor]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (_RANKS,))
    return {
        key: DTensor.from_local(shard, mesh, [Shard(0)], run_check=False) for key, shard in shards.items()
    }
