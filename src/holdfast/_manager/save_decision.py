"""Decides which steps a run saves, alike on all ranks."""

import logging
import time
from typing import Any

from holdfast._background.save_future import SaveFuture
from holdfast._manager.preemption_notice import PreemptionNotice
from holdfast._manager.step_agreement import Boundary, Reasons, StepAgreement
from holdfast._steps.policies import Continuous, EverySeconds, Preempted, SaveMoment, WhenPolicy, policies_in
from holdfast.default_planner import DefaultSavePlanner
from holdfast.errors import CheckpointError

logger = logging.getLogger(__name__)

_TIME, _PREEMPTED = "time", "preempted"


class SaveDecision:
    """The decisions of one manager. Made on every rank, in the same order.

    Args:
        when: The policy; None to save every step that is asked for.
        is_new_run: Whether the run has no checkpoint yet.
        is_coordinator: Whether the clock of this rank counts.
        group: ``process_group`` and ``no_dist`` of the manager.

    Attributes:
        is_to_stop: Whether a signal came to some rank, and its boundary was reached.
        begun_step: The step that was saved last, or is being saved.
        saving: The save in the background that may not be done.
    """

    def __init__(
        self, when: WhenPolicy | None, *, is_new_run: bool, is_coordinator: bool, group: dict[str, Any]
    ) -> None:
        self.is_to_stop = False
        self.begun_step: int | None = None
        self.saving: SaveFuture | None = None
        self._when = when
        self._is_first = is_new_run
        self._is_coordinator = is_coordinator
        self._begun_at = time.monotonic()
        self._boundary: Boundary = (-1, 0)
        self._time_is_asked_for = False
        parts = () if when is None else policies_in(when)
        self._timed = [part for part in parts if isinstance(part, EverySeconds | Continuous)]
        signals = [number for part in parts if isinstance(part, Preempted) for number in part.signals]
        self._notice = PreemptionNotice(signals) if signals else None
        self._agreement: StepAgreement | None = None
        if signals or self._timed:
            self._agreement = StepAgreement(group["process_group"], self._reasons, no_dist=group["no_dist"])

    def _reasons(self) -> Reasons:
        """Why this rank wants a save that the others do not know of. Called from a thread, too."""
        found = set()
        if self._notice is not None and self._notice.has_come and not self.is_to_stop:
            found.add(_PREEMPTED)
        if self._is_coordinator and not self._time_is_asked_for and any(map(self._is_due, self._timed)):
            self._time_is_asked_for = True
            found.add(_TIME)
        return frozenset(found)

    def _is_due(self, policy: EverySeconds | Continuous) -> bool:
        if isinstance(policy, Continuous) and self.saving is not None and not self.saving.done():
            return False
        return time.monotonic() - self._begun_at >= policy.seconds

    def begin(self, step: int) -> None:
        """A step is being saved."""
        self.begun_step, self._begun_at = step, time.monotonic()

    def should_save(self, step: int, *, is_last: bool) -> bool:
        """Whether to save a step."""
        reasons = self._reach((step, 0))
        if step == self.begun_step:
            return False
        moment = SaveMoment(step, self._is_first, is_last)
        self._is_first = False
        # A poll may have been told of a signal first: the next step is saved all the same.
        return bool(reasons) or self.is_to_stop or self._when is None or self._when.wants(moment)

    def poll(self) -> bool:
        """Whether the run is to end."""
        self._reach((self._boundary[0], self._boundary[1] + 1))
        return self.is_to_stop

    def _reach(self, boundary: Boundary) -> Reasons:
        self._boundary = boundary
        if self._agreement is None:
            return frozenset()
        reasons = self._agreement.reach(boundary)
        if _TIME in reasons:
            self._time_is_asked_for = False
        if _PREEMPTED in reasons and not self.is_to_stop:
            self.is_to_stop = True
            logger.warning("the run is to end: a signal of pre-emption came to some rank")
        return reasons

    def close(self) -> None:
        """Stop looking for signals."""
        if self._agreement is not None:
            self._agreement.close()
        if self._notice is not None:
            self._notice.close()


class RefusingPlanner(DefaultSavePlanner):
    """Refuses a save: raises an error where a save plans, the first step that all ranks take together.

    So it fails on all ranks alike, before anything is written.

    Args:
        error: Why the save is refused.
    """

    def __init__(self, error: CheckpointError) -> None:
        super().__init__()
        self._error = error

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        """Raise the error: the save is refused."""
        raise self._error
