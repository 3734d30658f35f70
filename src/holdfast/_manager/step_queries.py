"""What can be asked of a run: its steps, the newest and the best, their metrics and paths; and its pins."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast._steps.policies import Best, StepFacts, unknown_metric
from holdfast._steps.run_root import RunRoot
from holdfast._steps.step_list import Step, StepList
from holdfast._steps.step_metadata import METRICS, USER, facts_of
from holdfast._steps.step_names import check_step
from holdfast.errors import CheckpointNotFoundError, UsageError

logger = logging.getLogger(__name__)


class StepQueries:
    """The half of a manager that looks. Every method works on any one rank, and looks at the root anew."""

    _root: RunRoot
    read_only: bool

    def steps(self) -> list[int]:
        """The complete steps in the order of the run, the newest last. Known damage is left out."""
        return [step.number for step in self._root.find_steps().usable]

    def latest(self) -> int | None:
        """The newest complete step; None if there is none. On an object store this takes few requests."""
        usable = self._root.find_newest().usable
        return usable[-1].number if usable else None

    def best(
        self, metric: str | Callable[[Mapping[str, Any]], float], *, highest: bool = False
    ) -> int | None:
        """The complete step with the lowest, or highest, value of a metric; None if no step has it.

        If there are steps, and none has a metric of this name, the log says so.
        """
        policy, steps = Best(1, metric, highest), self._facts(self._root.find_steps())
        problem = unknown_metric(policy, steps)
        if steps and problem:
            logger.warning("%s: %s", self._root.place, problem)
        ranked = policy.sorted(steps)
        return ranked[0].number if ranked else None

    def _facts(self, found: StepList) -> list[StepFacts]:
        usable = found.usable
        return facts_of(usable, self._root.metadata.of(usable, found.files))

    def metrics(self, step: int) -> Mapping[str, Any]:
        """The metrics of a step."""
        return self._kept(step, METRICS)

    def metadata(self, step: int) -> Mapping[str, Any]:
        """The metadata that a step was saved with."""
        return self._kept(step, USER)

    def _kept(self, step: int, what: str) -> Mapping[str, Any]:
        found = self._root.find_steps()
        known = self._root.metadata.of([self._complete(step, found)], found.files)
        values: Mapping[str, Any] = known.get(step, {}).get(what, {})
        return values

    @property
    def run_metadata(self) -> dict[str, Any]:
        """What was passed as ``metadata`` to a manager of this root."""
        return self._root.read_run_metadata()

    def path(self, step: int) -> str:
        """The path or URL of a step that exists.

        Raises:
            CheckpointNotFoundError: There is no such step, or it is not complete.
        """
        return self._root.place_of(self._complete(step, self._root.find_steps()).folder)

    def _complete(self, number: int, found: StepList) -> Step:
        check_step(number)
        step = found.find(number)
        if step is None or step.commit is None:
            known = ", ".join(str(other.number) for other in found.usable[-5:]) or "none"
            raise CheckpointNotFoundError(
                f"{self._root.place}: there is no complete step {number}; the newest ones: {known}",
                path=self._root.place,
            )
        return step

    def new_steps(self, *, timeout: float | None = None, every: float = 5.0) -> Iterator[int]:
        """Yield each complete step once, the oldest first, and wait for new ones: for an evaluator.

        A step that was saved again is yielded again. One that is pruned before you restore it is gone: pin
        it, or keep enough.

        Args:
            timeout: End after so many seconds without a new step; None: never.
            every: After how many seconds to look again.
        """
        seen: set[tuple[str, str]] = set()
        waited_since = time.monotonic()
        while True:
            for step in self._root.find_steps().usable:
                key = (step.folder, step.commit.version if step.commit else "")
                if key not in seen:
                    seen.add(key)
                    yield step.number
                    waited_since = time.monotonic()
            left = None if timeout is None else timeout - (time.monotonic() - waited_since)
            if left is not None and left <= 0:
                return
            time.sleep(every if left is None else min(every, left))

    def pin(self, step: int) -> None:
        """Keep a step, whatever the policy says, until ``unpin``.

        Raises:
            CheckpointNotFoundError: There is no such step.
            UsageError: The manager is for reading only.
        """
        self._check_may_write()
        self._root.pin(self._complete(step, self._root.find_steps()).folder)

    def unpin(self, step: int) -> None:
        """Leave a step to the policy again. Raises as :meth:`pin`."""
        self._check_may_write()
        self._root.unpin(self._complete(step, self._root.find_steps()).folder)

    def _check_may_write(self) -> None:
        if self.read_only:
            raise UsageError(f"{self._root.place}: this manager is for reading only (read_only=True)")
