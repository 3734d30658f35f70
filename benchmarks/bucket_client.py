"""The process of one save or load at a URL, or of one rank of it.

``python -m benchmarks.bucket_client save|load LAYOUT SIDE URL COUNT ROWS [RANK FOLDER]`` prints JSON: the CPU
seconds of the process and its extra memory, in bytes. The memory is that of the first save or load, the CPU
time that of the second: on a virtual machine, memory that its host has not given it yet takes up to fifty
times as long to touch, and whether a process gets such memory is chance. A layout that is a part of a tensor
is loaded in a process that has asked the server for nothing else, so that requests can be counted.
"""

import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.bucket_sides import bucket_side
from benchmarks.footprint import Footprint
from benchmarks.one_slice import RANK, RANKS, shard_of_rank
from benchmarks.rank import check_held, held_by_rank, local_part
from benchmarks.ranks import RANKS as REAL_RANKS
from benchmarks.states import KIB, Tensors

__all__ = ["Layout", "Operation", "run_client", "run_ranks"]

Operation = Literal["save", "load"]
Layout = Literal["whole", "slice", "rows", "columns"]
"""All in one process, the eighth of one of eight ranks, or the halves of two ranks that talk over gloo."""


def run_client(
    operation: Operation,
    layout: Layout,
    side: str,
    url: str,
    contents: Tensors,
    environment: Mapping[str, str],
) -> dict[str, float]:
    """What one operation takes: ``cpu``, in seconds, and ``extra``, in bytes."""
    command = _command(operation, layout, side, url, contents)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_ranks(
    operation: Operation,
    layout: Layout,
    side: str,
    url: str,
    contents: Tensors,
    environment: Mapping[str, str],
    folder: Path,
) -> None:
    """Let two ranks do it together; they meet in ``folder``. If one fails, the other is ended."""
    command = _command(operation, layout, side, url, contents)
    meeting = folder / "store"
    meeting.unlink(missing_ok=True)
    ranks = [
        subprocess.Popen([*command, str(rank), str(meeting)], stdout=subprocess.DEVNULL, env=environment)
        for rank in range(REAL_RANKS)
    ]
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.returncode for rank in ranks):
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank in ranks:
        if rank.returncode:
            raise subprocess.CalledProcessError(rank.returncode, command)


def _command(operation: str, layout: str, side: str, url: str, contents: Tensors) -> list[str]:
    count, (rows, _) = contents.count, contents.shape
    return [sys.executable, "-m", __name__, operation, layout, side, url, str(count), str(rows)]


def _measured(work: Callable[[], object]) -> dict[str, float]:
    footprint, before = Footprint(), _cpu_seconds()
    work()
    return {"cpu": _cpu_seconds() - before, "extra": footprint.extra()}


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _whole(operation: str, side_name: str, url: str, contents: Tensors) -> dict[str, float]:
    side = bucket_side(side_name)
    side.warm_up(f"{url}-warm-up-{operation}")
    if operation == "save":
        state = contents.filled()
        first, second = (_measured(partial(side.save, state, to)) for to in (f"{url}-first", url))
    else:
        state = contents.blank()
        first = _measured(partial(side.load, state, url))
        contents.clear(state)
        second = _measured(partial(side.load, state, url))
        contents.check(state)
    return {"cpu": second["cpu"], "extra": first["extra"]}


def _slice(side_name: str, url: str, contents: Tensors) -> None:
    wanted = {
        f"layers.{number}.weight": contents.value(f"layers.{number}.weight").chunk(RANKS)[RANK]
        for number in range(contents.count)
    }
    parts = {key: torch.empty_like(value).zero_() for key, value in wanted.items()}
    bucket_side(side_name).load({key: shard_of_rank(part) for key, part in parts.items()}, url)
    for key, value in wanted.items():
        assert torch.equal(parts[key].view(torch.int32), value.view(torch.int32)), f"{key} was loaded wrong"


def _rank(
    operation: str,
    layout: Literal["rows", "columns"],
    side_name: str,
    url: str,
    contents: Tensors,
    rank: int,
    meeting: str,
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=REAL_RANKS)
    side = bucket_side(side_name, together=True)
    state = held_by_rank(contents, layout, init_device_mesh("cpu", (REAL_RANKS,)))
    if operation == "save":
        side.save(state, url)
    else:
        for value in state.values():
            local_part(value).zero_()
        side.load(state, url)
        check_held(contents, layout, state)
    dist.barrier()
    dist.destroy_process_group()


def _main(operation: str, layout: Any, side: str, url: str, count: str, rows: str, *meeting: str) -> None:
    contents = Tensors(int(count), (int(rows), KIB))
    found: dict[str, float] = {}
    if layout == "whole":
        found = _whole(operation, side, url, contents)
    elif layout == "slice":
        _slice(side, url, contents)
    else:
        _rank(operation, layout, side, url, contents, int(meeting[0]), meeting[1])
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _main(*sys.argv[1:])
