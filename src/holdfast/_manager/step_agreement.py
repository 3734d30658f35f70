"""How ranks agree to save at the same step, for reasons that only one of them knows: a signal, or its clock.

Most steps cost a lock that nobody else wants, and no message. Each rank has a thread that looks twice a
second whether this rank has a reason, or another rank has said in the key-value store of the process group
that it has one. Then the threads of all ranks tell each other, over a channel, at which boundary their
trainers are, and the furthest one is the answer: every rank acts at its first boundary after that. From the
moment when a rank has told its boundary until it knows the answer, its trainer waits at the next boundary. So
no rank can run past it, and none waits for a rank that waits for it: the answers come from the threads.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from holdfast._ranks.exchange import Alone, Exchange
from holdfast._ranks.group_exchange import open_exchange

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5

Boundary: TypeAlias = tuple[int, int]
"""A step, and how many times the trainer has asked since."""
_BEFORE_ALL: Boundary = (-(1 << 62), 0)

Reasons: TypeAlias = frozenset[str]


class StepAgreement:
    """The agreement of one manager. Made on every rank of the group, in the same order.

    Args:
        group: The ranks; None for all.
        wants: Returns why this rank wants a save now; called by the thread, or by the trainer if it is alone.
        no_dist: Whether this process is alone, whatever groups there are.
    """

    _numbers = 0

    def __init__(
        self, group: dist.ProcessGroup | None, wants: Callable[[], Reasons], *, no_dist: bool = False
    ) -> None:
        self._wants = wants
        self._here = _BEFORE_ALL
        self._is_open = False
        self._targets: list[tuple[Boundary, Reasons]] = []
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        exchange = open_exchange(group, purpose="CheckpointManager", no_dist=no_dist)
        if isinstance(exchange, Alone):
            return
        StepAgreement._numbers += 1
        whole = group or dist.group.WORLD
        assert whole is not None
        store = _get_process_group_store(whole)
        key = f"holdfast/manager/{StepAgreement._numbers}"
        self._thread = threading.Thread(
            target=self._watch, args=(exchange, store, key), name="holdfast-agreement", daemon=True
        )
        self._thread.start()

    def reach(self, boundary: Boundary) -> Reasons:
        """The trainer has come to a boundary: why all ranks act here, nothing if they do not."""
        if self._thread is None:
            return self._wants()
        with self._changed:
            while self._is_open:
                self._changed.wait()
            self._here = boundary
            if not self._targets:
                return frozenset()
            due = [reasons for furthest, reasons in self._targets if boundary > furthest]
            self._targets = [target for target in self._targets if boundary <= target[0]]
        return frozenset().union(*due)

    def _watch(self, exchange: Exchange, store: Any, key: str) -> None:
        try:
            with exchange:
                count = 0
                while not self._closed.wait(LOOK_SECONDS):
                    mine, name = self._wants(), f"{key}/{count}"
                    if mine:
                        store.set(name, "yes")
                    if mine or store.check([name]):
                        self._agree(exchange, mine)
                        count += 1
        except Exception as error:  # noqa: BLE001 - the process group was destroyed, or a rank is gone
            # At the end of a program ranks end one after the other.
            level = logging.INFO if self._closed.is_set() or not dist.is_initialized() else logging.WARNING
            logger.log(level, "ranks cannot agree on saves by time or signal any more: %s", error)
        finally:
            self._set_open(is_open=False)

    def _agree(self, exchange: Exchange, mine: Reasons) -> None:
        def tell() -> tuple[Boundary, Reasons]:
            return self._set_open(is_open=True), mine

        def decide(ranks: list[tuple[Boundary, Reasons]]) -> tuple[Boundary, Reasons]:
            return max(here for here, _ in ranks), frozenset().union(*(reasons for _, reasons in ranks))

        target = exchange.agree("agree on the step to save", tell, decide)
        with self._changed:
            self._targets.append(target)
        self._set_open(is_open=False)

    def _set_open(self, *, is_open: bool) -> Boundary:
        with self._changed:
            self._is_open = is_open
            self._changed.notify_all()
            return self._here

    def close(self) -> None:
        """Stop looking. Waits until the thread has ended, a second at most."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(2 * LOOK_SECONDS)
