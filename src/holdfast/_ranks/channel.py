"""The channel of a process group: opened once, kept as long as the group, and never its collectives again.

It is a star of sockets with the coordinator in the middle. Opening it takes two small collectives of the
caller's group, whatever its backend; from then on a save or load in any thread runs beside the trainer's
own collectives without touching them.

Why not a ``TCPStore``: a client of a stopped server hangs in native code past every timeout (measured:
12 s with a timeout of 3, until the server was killed), a dead rank is seen only by what it no longer
writes, and every wait is a poll. A socket says at once that the other end is gone.
"""

import atexit
import itertools
import resource
import threading
import weakref
from typing import Any

import torch.distributed as dist

from holdfast._ranks.addresses import addresses
from holdfast._ranks.failures import Failures, attempt
from holdfast._ranks.hub import Hub
from holdfast._ranks.member import Member
from holdfast.errors import WRAPPED_EXCEPTION, CheckpointException, UsageError

__all__ = ["Channel", "open_channel"]


class Channel:
    """This rank's end of a group's channel.

    Attributes:
        rank: This rank's number in the group.
        world_size: How many ranks there are.
        coordinator: The rank in the middle.
        hub: The coordinator's end; None on every other rank.
        member: The end of every other rank; None on the coordinator.
        token: The secret of the group.
        docks: Where each rank's lanes arrive: hosts and port.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        coordinator: int,
        end: Hub | Member,
        token: bytes,
        docks: list[tuple[list[str], int]],
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.coordinator = coordinator
        self.end = end
        self.token = token
        self.docks = docks
        self.hub = end if isinstance(end, Hub) else None
        self.member = end if isinstance(end, Member) else None
        self._numbers = itertools.count()

    def begin(self) -> int:
        """The number of a new session; the same on every rank that has made the same calls before."""
        number = next(self._numbers)
        self.end.begin(number)
        return number


class _Slot:
    """The channels of one group, by coordinator; a group has one, seldom more."""

    def __init__(self) -> None:
        self.opening = threading.Lock()
        self.channels: dict[int, Channel] = {}


_slots: "weakref.WeakKeyDictionary[dist.ProcessGroup, _Slot]" = weakref.WeakKeyDictionary()
_slots_lock = threading.Lock()
_open_ends: "weakref.WeakSet[Hub | Member]" = weakref.WeakSet()


def open_channel(group: dist.ProcessGroup | None = None, coordinator_rank: int = 0) -> Channel:
    """The channel of a group, opened if this is its first use.

    To be called on every rank of the group. The first call uses the group's own collectives, so that it
    must be made in the thread that makes the trainer's, in the same order on all ranks; later ones do not.
    A group that has been destroyed and made anew is a new group.

    Args:
        group: The process group; by default all ranks.
        coordinator_rank: The number in the group of the rank that decides.

    Raises:
        UsageError: This process is not in the group, or the coordinator is not.
        CheckpointException: Some rank cannot reach the coordinator; the same on every rank.
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
    with _slots_lock:
        slot = _slots.setdefault(whole, _Slot())
    with slot.opening:
        if coordinator_rank not in slot.channels:
            channel = _agree(whole, rank, world_size, coordinator_rank)
            _open_ends.add(channel.end)
            # Not at exit: the order there is ours, see below.
            weakref.finalize(whole, channel.end.close, 0.0).atexit = False
            slot.channels[coordinator_rank] = channel
        return slot.channels[coordinator_rank]


def _agree(group: dist.ProcessGroup, rank: int, world_size: int, coordinator: int) -> Channel:
    root = dist.get_global_rank(group, coordinator)
    end: Hub | Member | None = None
    failure: WRAPPED_EXCEPTION | None = None
    offer: list[Any] = [None]
    if rank == coordinator:
        hub, failure = attempt(lambda: _open_hub(rank, world_size))
        end = hub
        if isinstance(hub, Hub):
            offer = [(addresses(is_master=root == 0), hub.port, hub.token)]
    dist.broadcast_object_list(offer, src=root, group=group)
    if rank != coordinator and offer[0] is not None:
        end, failure = attempt(lambda: Member(rank, coordinator, *offer[0]))
    place = None if end is None else (addresses(is_master=dist.get_rank() == 0), end.dock.port)
    outcomes: list[Any] = [None] * world_size
    dist.all_gather_object(outcomes, (failure, place), group=group)
    failures: Failures = {who: found for who, (found, _) in enumerate(outcomes) if found is not None}
    if failures:
        if end is not None:
            end.close()
        raise CheckpointException.of("connect", failures)
    assert end is not None
    return Channel(rank, world_size, coordinator, end, offer[0][2], [docked for _, docked in outcomes])


def _open_hub(rank: int, world_size: int) -> Hub:
    # One socket for each rank; many systems begin with a limit of 1024, and allow more for the asking.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * world_size + 512
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard) if hard >= 0 else needed, hard))
    return Hub(rank, world_size)


@atexit.register
def _close_all() -> None:
    """Say goodbye, so that peers in the middle of a step learn at once that this process has ended."""
    for end in list(_open_ends):
        end.close()
