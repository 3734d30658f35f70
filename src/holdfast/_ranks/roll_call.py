"""Which ranks have called: asked before the first collective of a group's channel is made.

``if rank == 0: save(...)`` is a common mistake. The collectives that open a channel would then meet the
training collectives of the other ranks, and fail or hang for reasons that nobody understands. So every rank
first signs in at the key-value store of its process group, and waits there until all have done so.
"""

import logging
import time
import traceback
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store, default_pg_timeout

from holdfast._ranks.departures import departed_ranks
from holdfast._ranks.failures import EVERY_RANK, Failures, PackedFailure
from holdfast.errors import CheckpointError, CheckpointException, RankLostError, UsageError, describe_ranks

logger = logging.getLogger(__name__)

FIRST_REMINDER = 10.0
"""After how many seconds a rank says which others have not called."""
_LONGEST_INTERVAL = 600.0
_FIRST_LOOK, _LONGEST_LOOK_INTERVAL = 1.0, 10.0
_SHORTEST_NAP, _LONGEST_NAP = 0.0005, 0.1


def next_interval(seconds: float) -> float:
    """How long to wait for the next reminder, after this long a wait for the last one."""
    return min(2 * seconds, _LONGEST_INTERVAL)


def describe_absence(ranks: list[int], purpose: str) -> str:
    """Say that ranks have not called."""
    verb = "has" if len(ranks) == 1 else "have"
    return f"{describe_ranks(ranks)} {verb} not called {purpose} yet: {EVERY_RANK}"


def describe_departure(ranks: list[int], purpose: str) -> str:
    """Say that ranks have ended and have not called."""
    verb = "has" if len(ranks) == 1 else "have"
    ended = f"{describe_ranks(ranks)} {verb} ended, or left the process group"
    return f"{ended}, without calling {purpose}: {EVERY_RANK}"


def absent_ranks(ranks: list[int], purpose: str) -> Failures:
    """The failure of a step because ranks have never called."""
    return _same_failure(UsageError(describe_absence(ranks, purpose), rank=ranks[0]), ranks)


def _same_failure(error: CheckpointError, ranks: list[int]) -> Failures:
    return dict.fromkeys(ranks, PackedFailure.of((error, traceback.StackSummary())))


def _raise(failures: Failures) -> NoReturn:
    raise CheckpointException.of("connect", {who: failure.unpacked() for who, failure in failures.items()})


def call_timeout(group: dist.ProcessGroup) -> float:
    """For how many seconds ranks wait for each other to call: as long as in any collective of the group."""
    try:
        # torch has no public name for it, and not every backend has it.
        timeout = group._get_backend(group._device_types[0]).options._timeout  # noqa: SLF001
    except (AttributeError, IndexError, RuntimeError):
        timeout = default_pg_timeout
    return float(timeout.total_seconds())


def call_roll(group: dist.ProcessGroup, coordinator: int, purpose: str) -> None:
    """Return when every rank of a group has called this; log meanwhile which have not.

    Args:
        group: The process group.
        coordinator: The coordinator of the channel that is to be opened.
        purpose: What was called, ``"save"`` or ``"load"``.

    Raises:
        CheckpointException: Some rank has not called within the timeout of the group, or has ended.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    store = _get_process_group_store(group)
    keys = [f"holdfast/{coordinator}/rank {number}" for number in range(world_size)]
    all_are_here = f"holdfast/{coordinator}/all"
    store.set(keys[rank], "here")
    if store.check(keys):
        store.set(all_are_here, "yes")
        return
    began, interval, nap = time.monotonic(), FIRST_REMINDER, _SHORTEST_NAP
    give_up_at, remind_at = began + call_timeout(group), began + interval
    look_interval = _FIRST_LOOK
    look_at = began + look_interval
    while not store.check([all_are_here]):
        now = time.monotonic()
        if now >= min(give_up_at, remind_at, look_at):
            absent = [number for number, key in enumerate(keys) if not store.check([key])]
            if departed := departed_ranks(group, absent):
                _raise(_same_failure(RankLostError(describe_departure(departed, purpose)), departed))
            if absent and now >= give_up_at:
                _raise(absent_ranks(absent, purpose))
            look_interval = min(2 * look_interval, _LONGEST_LOOK_INTERVAL)
            look_at = now + look_interval
            if now >= remind_at:
                # One of those who wait is enough to say so.
                if absent and rank == min(set(range(world_size)).difference(absent)):
                    logger.warning("%s", describe_absence(absent, purpose))
                interval = next_interval(interval)
                remind_at = now + interval
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP)
