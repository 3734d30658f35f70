"""The channel of a process group: it is opened once, and lives as long as the group.

It is a star of sockets with the coordinator in the middle. Opening it takes two small collectives of the
caller's group, whatever its backend, once all ranks have called; from then on a save or load in any thread
runs beside the trainer's own collectives without touching them.

Why it is not a ``TCPStore``: a client of a stopped server hangs in native code past every timeout
(measured: 12 s with a timeout of 3, until the server was killed), a dead rank is seen only by what it no
longer writes, and every wait is a poll. A socket shows at once that the other end is gone.
"""

import atexit
import errno
import itertools
import os
import resource
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from holdfast._ranks.addresses import Address, address_of_port
from holdfast._ranks.coordinator import CoordinatorEnd
from holdfast._ranks.failures import attempt
from holdfast._ranks.listener import MOST_UNPROVED
from holdfast._ranks.roll_call import call_roll, call_timeout
from holdfast._ranks.worker import WorkerEnd
from holdfast.errors import WRAPPED_EXCEPTION, CheckpointException, UsageError

_OTHER_FILES = 32  # files that a save itself has open at the same time, with some to spare


@dataclass(frozen=True)
class Channel:
    """This rank's end of a group's channel.

    Attributes:
        rank: This rank's number in the group.
        end: The coordinator's end or a worker's, depending on the rank.
        secret: What the ranks of the group know, and nobody else.
        addresses: Where each rank listens.
        numbers: The numbers of the sessions to come.
    """

    rank: int
    end: CoordinatorEnd | WorkerEnd
    secret: bytes
    addresses: list[Address]
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def begin(self, timeout: float) -> int:
        """Return the number of a new session: the same on every rank that has made the same calls before."""
        number = next(self.numbers)
        self.end.begin(number, timeout)
        return number


class _GroupChannels:
    """The channels of one group, by coordinator; a group has one, seldom more."""

    def __init__(self) -> None:
        self.opening = threading.Lock()
        self.channels: dict[int, Channel] = {}


_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupChannels]" = weakref.WeakKeyDictionary()
_groups_lock = threading.Lock()
_open_ends: "weakref.WeakSet[CoordinatorEnd | WorkerEnd]" = weakref.WeakSet()


def open_channel(
    group: dist.ProcessGroup | None = None, coordinator_rank: int = 0, purpose: str = "save"
) -> Channel:
    """Return the channel of a group; the first call opens it.

    Every rank of the group must call it. The first call waits until all have done so. Then it uses the
    group's own collectives, so it must be made in the thread that makes the trainer's, in the same order on
    all ranks; later calls use none. A group that has been destroyed and made again is a new group.

    Args:
        group: The process group; by default all ranks.
        coordinator_rank: The number in the group of the rank that decides.
        purpose: What was called, ``"save"`` or ``"load"``, for messages.

    Raises:
        UsageError: This process is not in the group, or the coordinator is not.
        CheckpointException: Some rank has not called within the timeout of the group; or cannot reach the
            coordinator; or the coordinator may not open a socket for each rank. The same on every rank.
    """
    whole = group if group is not None else dist.group.WORLD
    assert whole is not None
    rank, world_size = dist.get_rank(whole), dist.get_world_size(whole)
    if rank < 0:
        raise UsageError("this process is not in the process group that it wants to save or load with")
    if not 0 <= coordinator_rank < world_size:
        raise UsageError(
            f"the coordinator is to be rank {coordinator_rank} of a group of {world_size}",
            expected=f"0 to {world_size - 1}",
            found=coordinator_rank,
        )
    with _groups_lock:
        of_group = _groups.setdefault(whole, _GroupChannels())
    with of_group.opening:
        if coordinator_rank not in of_group.channels:
            call_roll(whole, coordinator_rank, purpose)
            channel = _connect_ranks(whole, rank, world_size, coordinator_rank)
            _open_ends.add(channel.end)
            # Not at exit: the order there is ours, see below.
            weakref.finalize(whole, channel.end.close, 0.0).atexit = False
            of_group.channels[coordinator_rank] = channel
        return of_group.channels[coordinator_rank]


def _connect_ranks(group: dist.ProcessGroup, rank: int, world_size: int, coordinator: int) -> Channel:
    root = dist.get_global_rank(group, coordinator)
    opened: tuple[CoordinatorEnd | WorkerEnd, Address] | None = None
    failure: WRAPPED_EXCEPTION | None = None
    offer: list[Any] = [None]
    if rank == coordinator:
        timeout = call_timeout(group)
        opened, failure = attempt(lambda: _with_address(_open_coordinator(rank, world_size, timeout)))
        if opened is not None and isinstance(opened[0], CoordinatorEnd):
            offer = [(opened[1], opened[0].secret)]
    dist.broadcast_object_list(offer, src=root, group=group)
    if rank != coordinator and offer[0] is not None:
        opened, failure = attempt(lambda: _with_address(WorkerEnd(rank, coordinator, *offer[0])))
    end, address = opened or (None, None)
    outcomes: list[Any] = [None] * world_size
    dist.all_gather_object(outcomes, (failure, address), group=group)
    failures = {who: found for who, (found, _) in enumerate(outcomes) if found is not None}
    if failures:
        if end is not None:
            end.close()
        raise CheckpointException.of("connect", failures)
    assert end is not None
    return Channel(rank, end, offer[0][1], [where for _, where in outcomes])


def _with_address(end: CoordinatorEnd | WorkerEnd) -> tuple[CoordinatorEnd | WorkerEnd, Address]:
    """Return an end and where it listens; close it if that cannot be found out."""
    try:
        return end, address_of_port(end.listener.port, is_master=dist.get_rank() == 0)
    except BaseException:
        end.close()
        raise


def _open_coordinator(rank: int, world_size: int, call_timeout: float) -> CoordinatorEnd:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = world_size - 1 + MOST_UNPROVED + _OTHER_FILES
    is_open = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    if limit != resource.RLIM_INFINITY and is_open + needed > limit:
        raise OSError(
            errno.EMFILE,
            f"rank {rank} coordinates {world_size} ranks and needs {needed} open files for that, besides the "
            f"{is_open} that it has open, but its limit (RLIMIT_NOFILE) is {limit}. Start the job with a "
            f"higher limit, for example: ulimit -n {2 * (is_open + needed)}",
        )
    return CoordinatorEnd(rank, world_size, call_timeout)


@atexit.register
def _close_all() -> None:
    """Close all channels, so that peers in the middle of a step learn at once that this process has ended."""
    for end in list(_open_ends):
        end.close()
