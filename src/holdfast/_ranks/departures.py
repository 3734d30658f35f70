"""Which ranks have left a process group, as far as this process can tell without their help.

The store of a group does not tell that a process has ended. Two others do: gloo refuses at once (0.2 ms) to
receive from a rank whose connection is closed, and torchrun's processes on this machine are in ``/proc``.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_TAG = 0x401DFA57  # that no message of a program has
_MOST_ASKED = 8  # at once: each question leaves a few bytes on the rank that is asked


def departed_ranks(group: dist.ProcessGroup, ranks: Sequence[int]) -> list[int]:
    """Those of some ranks that have ended or left the group, as far as it is known; never waits.

    A rank that is named has left for certain. One that is not named may have left, too: of a group without
    gloo only the ranks that torchrun has started on this machine are known.
    """
    gone = _ended_beside_this_process(group, ranks)
    return gone or [rank for rank in ranks[:_MOST_ASKED] if _has_left_gloo(group, rank)]


def _has_left_gloo(group: dist.ProcessGroup, rank: int) -> bool:
    try:
        # torch has no public name for it. It raises if the group has no backend for tensors of the host.
        backend: Any = group._get_backend(torch.device("cpu"))  # noqa: SLF001
        if backend.name() == "gloo":
            # What would be received is never sent; gloo forgets it with the object that this returns.
            backend.recv([torch.empty(1, device="cpu")], rank, _TAG)
    except RuntimeError as error:
        # "Connection closed by peer", or "reset" if it was killed. After a timeout there are other words.
        return "by peer" in str(error)
    return False


def _ended_beside_this_process(group: dist.ProcessGroup, ranks: Sequence[int]) -> list[int]:
    """Those of some ranks that torchrun has started beside this process, and that do not run any more."""
    own, parent = _environment("self"), _environment(str(os.getppid()))
    # torchrun tells this to its workers only. If the parent was told too, it is a worker, and not torchrun.
    if own is None or "TORCHELASTIC_RUN_ID" not in own or parent is None or "TORCHELASTIC_RUN_ID" in parent:
        return []
    running = {
        environment.get("RANK")
        for pid in filter(str.isdigit, os.listdir("/proc"))
        if (environment := _environment(pid)) is not None
        and all(environment.get(name) == own.get(name) for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT"))
    }
    if own["RANK"] not in running:
        return []
    first = int(own["RANK"]) - int(own["LOCAL_RANK"])
    beside = range(first, first + int(own["LOCAL_WORLD_SIZE"]))
    numbers = {rank: dist.get_global_rank(group, rank) for rank in ranks}
    return [rank for rank, number in numbers.items() if number in beside and str(number) not in running]


def _environment(pid: str) -> dict[str, str] | None:
    """The environment that a process was started with; None if it is not known."""
    try:
        lines = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return dict(line.partition("=")[::2] for line in lines if "=" in line)
