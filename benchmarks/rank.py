"""The process of one rank: saves and loads with the other one, both sides in turns.

``python -m benchmarks.rank CASE SCALE ROUNDS FOLDER RANK OUTPUT``; rank 0 writes the samples to OUTPUT, as
JSON.
"""

import json
import shutil
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.case import Job, Samples, interleave
from benchmarks.ranks import DISK_READS, RANKS, Layout, RankCase, rank_contents
from benchmarks.sides import Side, both_sides
from benchmarks.states import Tensors
from benchmarks.turns import drop_caches, read_through, seconds_of

__all__ = [
    "by_the_first",
    "bytes_counted",
    "check_held",
    "finish",
    "held_by_rank",
    "local_part",
    "measure",
    "run_as_rank",
    "say_for",
    "slowest_of",
]

_DIMENSIONS: dict[Layout, int] = {"rows": 0, "columns": 1}


def measure(case: RankCase, job: Job) -> Samples:
    """What this rank measures; all ranks call it at once."""
    mesh = init_device_mesh("cpu", (RANKS,))
    sides = both_sides(together=True)
    held = held_by_rank(case.contents, case.saved, mesh)
    target = held if case.saved == case.loaded else held_by_rank(case.contents, case.loaded, mesh)
    for side in sides:
        place = job.folder / f"warm-up-{side.name}"
        side.save({"x": torch.ones(4), "step": 1}, place)
        side.load({"x": torch.zeros(4), "step": 0}, place)
        if case.kind != "both":
            side.save(held, job.folder / side.name)
    if target is not held:
        held.clear()

    def act(side: Side) -> dict[str, float]:
        folder = job.folder / side.name
        found = {}
        if case.kind == "both":
            by_the_first(lambda: shutil.rmtree(folder, ignore_errors=True))
            found["save"] = slowest_of(lambda: side.save(held, folder))
        by_the_first(drop_caches if case.kind == "cold" else lambda: read_through(folder))
        for value in target.values():
            local_part(value).zero_()
        before = bytes_counted("read_bytes")
        found["load"] = slowest_of(lambda: side.load(target, folder))
        read = torch.tensor(bytes_counted("read_bytes") - before)
        check_held(case.contents, case.loaded, target)
        if case.kind == "cold":
            dist.all_reduce(read)
            found[DISK_READS] = read.item() / case.contents.nbytes
        return found

    return interleave(sides, act, rounds=job.rounds, name_of=lambda side: side.name, say=job.say)


def held_by_rank(contents: Tensors, layout: Layout, mesh: DeviceMesh) -> dict[str, Any]:
    """What this rank holds of the filled state."""
    state: dict[str, Any] = {}
    for number in range(contents.count):
        key = f"layers.{number}.weight"
        part = _part(contents, layout, key)
        if layout == "whole":
            state[key] = part
        else:
            whole = torch.empty(contents.shape, device="meta")
            state[key] = DTensor.from_local(
                part.clone(memory_format=torch.contiguous_format),
                mesh,
                [Shard(_DIMENSIONS[layout])],
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
    return state


def _part(contents: Tensors, layout: Layout, key: str) -> torch.Tensor:
    whole = contents.value(key)
    return whole if layout == "whole" else whole.chunk(RANKS, _DIMENSIONS[layout])[dist.get_rank()]


def local_part(value: Any) -> torch.Tensor:
    """What this rank has of a value."""
    return value.to_local() if isinstance(value, DTensor) else value


def check_held(contents: Tensors, layout: Layout, target: dict[str, Any]) -> None:
    """Raise AssertionError if this rank has other values than ``held_by_rank`` gives."""
    for key, value in target.items():
        wanted = _part(contents, layout, key).view(torch.int32)
        assert torch.equal(local_part(value).view(torch.int32), wanted), f"{key} was loaded wrong"


def slowest_of(work: Callable[[], object]) -> float:
    """How long the slowest rank takes for its part; all begin together."""
    seconds = torch.tensor(seconds_of(work, dist.barrier))
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def by_the_first(work: Callable[[], object]) -> None:
    """Let rank 0 do something, while the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def bytes_counted(name: str) -> int:
    """What the kernel has counted of this process in ``/proc/self/io``."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def say_for(name: str) -> Callable[[str], None]:
    """What prints lines of progress of a case; those of the first rank only."""
    is_first = dist.get_rank() == 0
    return lambda line: print(f"  {name}: {line}", file=sys.stderr, flush=True) if is_first else None


def finish(samples: Samples, output: str) -> None:
    """Let the first rank write the samples, and leave the group together."""
    by_the_first(lambda: Path(output).write_text(json.dumps(samples), encoding="ascii"))
    dist.destroy_process_group()


def run_as_rank(
    measure: Callable[[Job], Samples], name: str, rounds: str, folder: str, rank: str, output: str
) -> None:
    """Be one rank of a case; rank 0 writes the samples to ``output``."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=RANKS)
    finish(measure(Job(Path(folder), int(rounds), say_for(name))), output)


if __name__ == "__main__":
    name_, scale_, *rest = sys.argv[1:]
    run_as_rank(partial(measure, rank_contents(float(scale_))[name_]), name_, *rest)
