"""All saves in the background of this process: which wait for which, and which failures nobody has seen."""

import itertools
import os
import threading
import time
import traceback
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch.distributed as dist

from holdfast._background.running_save import RunningSave
from holdfast._ranks.exchange import Alone, Exchange
from holdfast.errors import WRAPPED_EXCEPTION, CheckpointException, UsageError, portable_failure

WhenBusy: TypeAlias = Literal["wait", "skip", "raise"]
"""What ``async_save`` does while an earlier one is not done."""


class Scope:
    """Those who save together: a process group, or this process alone.

    Attributes:
        is_unsettled: Whether there may be a save on some rank that runs, or failed unseen. It is the same on
            every rank: only a save in the background, which all ranks begin, sets it, and only together is it
            found to be settled. So ranks need not talk about it as long as nobody saves in the background.
    """

    def __init__(self) -> None:
        self.is_unsettled = False
        self._numbers = itertools.count()

    def begin(self) -> int:
        """The number of a new save, the same on every rank."""
        self.is_unsettled = True
        return next(self._numbers)


class _Unseen(NamedTuple):
    """A failure that nobody has looked at; without a number if it is of a save of one rank alone."""

    number: int | None
    place: str
    failure: WRAPPED_EXCEPTION


class _Findings(NamedTuple):
    """What ranks tell each other when the next call comes."""

    unseen: list[_Unseen]
    is_open: bool
    is_busy: bool


class RunningSaves:
    """The saves that run, and those whose failure nobody has seen. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves: list[RunningSave] = []
        self._alone = Scope()
        self._scopes: weakref.WeakKeyDictionary[Any, Scope] = weakref.WeakKeyDictionary()

    def scope(self, exchange: Exchange, group: dist.ProcessGroup | None) -> Scope:
        """The scope of a call."""
        if isinstance(exchange, Alone):
            return self._alone
        with self._lock:
            return self._scopes.setdefault(group or dist.group.WORLD, Scope())

    def begin(
        self, place: str, keys: frozenset[Hashable], exchange: Exchange, group: dist.ProcessGroup | None
    ) -> RunningSave:
        """The state of a new save; all ranks that save together must begin it."""
        scope = self.scope(exchange, group)
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        return RunningSave(place, keys, scope, scope.begin(), group, exchange.rank)

    def add(self, save: RunningSave) -> None:
        """Add a save that begins."""
        with self._lock:
            matter = [known for known in self._saves if not known.ended.is_set() or known.is_unseen_failure]
            self._saves = [*matter, save]

    def running(self) -> list[RunningSave]:
        """The saves that have not ended."""
        with self._lock:
            return [save for save in self._saves if not save.ended.is_set()]

    def unseen(self) -> list[RunningSave]:
        """The saves that have failed and whose failure nobody knows."""
        with self._lock:
            return [save for save in self._saves if save.is_unseen_failure]

    def busy(self, keys: frozenset[Hashable]) -> list[RunningSave]:
        """The saves that have not ended and want one of these things to themselves."""
        here = threading.get_ident()
        return [save for save in self.running() if save.keys & keys and save.thread != here]

    def wait_for(self, keys: frozenset[Hashable]) -> float:
        """Return when no save uses any of these; how many seconds that took."""
        start = time.monotonic()
        busy = self.busy(keys)
        for save in busy:
            save.wait()
        return time.monotonic() - start if busy else 0.0

    def come_after(
        self, exchange: Exchange, group: dist.ProcessGroup | None, keys: frozenset[Hashable]
    ) -> None:
        """Wait for saves that share one of the ``exclusive_keys`` of this call, and raise unseen failures.

        Every ``save`` and ``load`` does this first, on every rank.
        """
        self.wait_for(keys)
        self.settle(exchange, self.scope(exchange, group))

    def begin_after(self, running: RunningSave, exchange: Exchange, when_busy: WhenBusy) -> float | None:
        """Let a save come after the earlier ones that share something with it, on all ranks alike.

        Returns:
            How many seconds that took; None if there is one and this save is to be skipped.

        Raises:
            UsageError: There is one, and ``when_busy`` is "raise".
            CheckpointException: An earlier save failed, and nobody has seen it.
        """
        waited = self.wait_for(running.keys) if when_busy == "wait" else 0.0
        is_busy = self.settle(
            exchange,
            running.scope,
            is_busy=bool(self.busy(running.keys)),
            always=when_busy != "wait",
            leave_to_futures=True,
        )
        if is_busy and when_busy == "raise":
            raise UsageError(
                f"an earlier save is not done, and when_busy is 'raise': this one, to {running.place}, "
                "shares a place, a stager, a writer or a planner with it",
                path=running.place,
            )
        if is_busy and when_busy == "skip":
            return None
        running.scope.is_unsettled = True
        return waited

    def settle(
        self,
        exchange: Exchange,
        scope: Scope,
        *,
        is_busy: bool = False,
        always: bool = False,
        leave_to_futures: bool = False,
    ) -> bool:
        """Raise a failure that nobody has seen, the same on every rank; the first step of an exchange.

        Args:
            exchange: The call's own.
            scope: The call's own.
            is_busy: Whether this rank would have to wait for another save.
            always: Talk to the others whether or not there can be such a failure.
            leave_to_futures: Pass over, once, a failure whose future the caller still holds.

        Returns:
            Whether any rank is busy.

        Raises:
            CheckpointException: A save in the background has failed and nobody has looked at its future.
        """
        if not (always or scope.is_unsettled or (scope is self._alone and self.unseen())):
            return False
        found = exchange.agree(
            "look at earlier saves",
            lambda: self._findings(scope, is_busy=is_busy, leave_to_futures=leave_to_futures),
            _together,
        )
        scope.is_unsettled = found.is_open
        if found.unseen:
            self._mark(scope, found.unseen)
            raise _told_again(found.unseen[0], exchange.rank)
        return found.is_busy

    def _findings(self, scope: Scope, *, is_busy: bool, leave_to_futures: bool) -> _Findings:
        unseen: list[_Unseen] = []
        is_open = False
        with self._lock:
            saves = list(self._saves)
        for save in saves:
            error = save.error
            if save.scope is scope and not save.ended.is_set():
                is_open = True
            elif error is not None and save.is_unseen_failure:
                if save.is_awaited:
                    is_open = True
                elif leave_to_futures and save.may_still_be_looked_at:
                    save.passed_over = is_open = True
                elif save.scope is scope or scope is self._alone or save.scope is self._alone:
                    number = save.number if save.scope is scope else None
                    if number is None or scope is self._alone:
                        save.looked_at = True
                    failure = portable_failure((error, traceback.extract_tb(error.__traceback__)))
                    unseen.append(_Unseen(number, save.place, failure))
        return _Findings(unseen, is_open, is_busy)

    def _mark(self, scope: Scope, unseen: Sequence[_Unseen]) -> None:
        """What is raised on every rank has been seen, also where it has not been noticed yet."""
        numbers = {found.number for found in unseen}
        with self._lock:
            for save in self._saves:
                if save.scope is scope and save.number in numbers:
                    save.looked_at = True

    def forget(self) -> None:
        """Forget all saves: a forked child does not run those of its parent."""
        self._lock = threading.Lock()
        self._saves = []


def _together(ranks: Sequence[_Findings]) -> _Findings:
    unseen = sorted((one for rank in ranks for one in rank.unseen), key=lambda one: one.number or 0)
    return _Findings(unseen, any(rank.is_open for rank in ranks), any(rank.is_busy for rank in ranks))


def _told_again(unseen: _Unseen, rank: int) -> CheckpointException:
    """The failure of an earlier save as this call's exception: of the same class, with the same causes."""
    error, trace = unseen.failure
    step, failures = "save", {rank: (error, trace)}
    if isinstance(error, CheckpointException):
        step, failures = error.step or step, error.failures
    made = CheckpointException.of(step, failures)
    told = (
        f"an earlier save in the background, to {unseen.place}, failed at step {step!r} and nobody looked at "
        "its future; this call has done nothing"
    )
    made.args = (told, failures)
    return made


running_saves = RunningSaves()
"""Those of this process."""

os.register_at_fork(after_in_child=running_saves.forget)
