"""Which ranks have left a process group: asked of the connections that gloo keeps between its ranks.

The store of a group does not tell that a process has ended. gloo does: it refuses at once (0.2 ms) to receive
from a rank whose connection is closed. Other backends are not asked: their messages go through devices.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

_TAG = 0x401DFA57  # that no message of a program has
_MOST_ASKED = 8  # at once: each question leaves a few bytes on the rank that is asked


def departed_ranks(group: dist.ProcessGroup, ranks: Sequence[int]) -> list[int]:
    """Those of some ranks that have ended or left the group, as far as this process can tell; never waits.

    At most 8 of the ranks are asked. Nothing is sent that another message could be taken for.
    """
    try:
        # torch has no public name for it. It raises if the group has no backend for tensors of the host.
        backend = group._get_backend(torch.device("cpu"))  # noqa: SLF001
    except RuntimeError:
        return []
    if backend.name() != "gloo":
        return []
    return [rank for rank in ranks[:_MOST_ASKED] if not _can_receive(backend, rank)]


def _can_receive(backend: Any, rank: int) -> bool:
    try:
        # What would be received is never sent; gloo forgets it with the object that this returns.
        backend.recv([torch.empty(1)], rank, _TAG)
    except RuntimeError as error:
        # "Connection closed by peer", or "reset" if it was killed. After a timeout there are other words.
        return "by peer" not in str(error)
    return True
