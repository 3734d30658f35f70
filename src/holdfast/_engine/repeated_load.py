"""A load that begins again because another save replaced the checkpoint and removed its files."""

import logging
import sys
from collections.abc import Callable
from typing import TypeVar

from holdfast._ranks.exchange import Exchange
from holdfast.errors import CheckpointException, IncompleteCheckpointError, ReplacedCheckpointError

T = TypeVar("T")
logger = logging.getLogger(__name__)

_MOST_ATTEMPTS = 3
_NOTE = (
    "this load had begun before, with a checkpoint that another save replaced meanwhile: values of that one "
    "may be in the state"
)


class EarlierAttempt:
    """The failed attempt of a load before this one, if there was one.

    Args:
        failure: Why that failed; None for the first attempt.

    Attributes:
        may_have_changed: Whether it has begun to change the state, on some rank.
    """

    def __init__(self, failure: CheckpointException | None = None, *, may_have_changed: bool = False) -> None:
        self._failure = failure
        self.may_have_changed = may_have_changed

    def admit(self, exchange: Exchange, *, fills_all: bool) -> None:
        """Raise the failure on every rank unless a new attempt fills all that this one may have filled.

        A load that leaves alone what the checkpoint does not have might otherwise leave values of the old
        checkpoint, where the new one has none. Called on every rank, before anything else.
        """
        failure = self._failure
        if failure is None:
            return

        def agree_to_it() -> None:
            if not fills_all:
                raise next(iter(failure.failures.values()))[0]

        exchange.agree("read", agree_to_it, lambda _: None)


def repeat_if_replaced(attempt: Callable[[EarlierAttempt], T]) -> T:
    """Load; begin again, a few times at most, if the checkpoint was replaced meanwhile.

    Every rank calls it. All come to the same end of an attempt, and so to the same decision: a failed step
    raises the same on every rank.

    Args:
        attempt: Loads once, in an exchange of its own.

    Raises:
        CheckpointException: As the last attempt raised it.
    """
    earlier = EarlierAttempt()
    for left in reversed(range(_MOST_ATTEMPTS)):
        try:
            return attempt(earlier)
        except CheckpointException as error:  # noqa: PERF203 - three attempts at most
            if earlier.may_have_changed and sys.version_info >= (3, 11):
                error.add_note(_NOTE)
            if not (left and _is_replaced(error)):
                raise
            logger.warning("%s\nThe load begins again, with the new checkpoint.", error)
            earlier = EarlierAttempt(error, may_have_changed=earlier.may_have_changed or _may_change(error))
    raise AssertionError("the last attempt returns or raises")


def _is_replaced(error: CheckpointException) -> bool:
    causes = [cause for cause, _ in error.failures.values()]
    return all(isinstance(cause, IncompleteCheckpointError) for cause in causes) and any(
        isinstance(cause, ReplacedCheckpointError) for cause in causes
    )


def _may_change(error: CheckpointException) -> bool:
    """Whether some rank may have begun to change its state. Of those that did not fail nothing is known."""
    causes = [cause for cause, _ in error.failures.values()]
    is_alone = error.__cause__ in causes
    return not is_alone or any(getattr(cause, "may_have_changed", False) for cause in causes)
