"""Failures on their way between ranks: each arrives in some form, whatever its exception is."""

import pickle
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from holdfast._ranks.messages import Segments, decode, encode
from holdfast.errors import WRAPPED_EXCEPTION, RankLostError, RemoteError, portable_failure

Failures: TypeAlias = dict[int, WRAPPED_EXCEPTION]


class SessionFailure(NamedTuple):
    """Why a session has failed: the same on every rank.

    Attributes:
        step: The name of the step that failed.
        failures: By rank, what happened to it.
    """

    step: str
    failures: Failures


class SessionFailedError(Exception):
    """A session has failed; used inside this package only, which raises a CheckpointException for it.

    Attributes:
        failure: Why.
        is_told: Whether the coordinator said so; False if this rank concluded it from the coordinator's
            silence or loss.
    """

    def __init__(self, failure: SessionFailure, *, is_told: bool = True) -> None:
        super().__init__(failure)
        self.failure = failure
        self.is_told = is_told


def attempt(work: Callable[[], Any]) -> tuple[Any, WRAPPED_EXCEPTION | None]:
    """Return what ``work`` returns and None, or None and its exception in a form that can be sent.

    Interrupts (KeyboardInterrupt, SystemExit) are raised.
    """
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - whatever it is, every rank must learn of it
        return None, portable_failure((error, traceback.extract_tb(error.__traceback__)))


def lost_rank(rank: int, reason: str) -> Failures:
    """Return the failure of a step by the loss of a rank."""
    return {rank: (RankLostError(f"rank {rank} is lost: {reason}", rank=rank), traceback.StackSummary())}


def silent_rank(rank: int, timeout: float) -> Failures:
    """Return the failure of a step by a rank's silence."""
    return lost_rank(rank, f"no sign of life for {timeout:g} s. It is stopped, or its host is down")


def pack(failure: SessionFailure) -> Segments:
    """Return the failure as segments: each exception twice, as it is and as a description."""
    step, failures = failure
    forms = {rank: (pickle.dumps(f), pickle.dumps(_described(f))) for rank, f in failures.items()}
    return encode((step, forms))


def unpack(segments: Segments) -> SessionFailure:
    """Return the failure; where this process does not know the class of an exception, its description."""
    step, forms = decode(segments)
    return SessionFailure(step, {rank: _first_that_loads(*both) for rank, both in forms.items()})


def _described(failure: WRAPPED_EXCEPTION) -> WRAPPED_EXCEPTION:
    error, trace = failure
    return RemoteError.from_exception(error), trace


def _first_that_loads(as_it_is: bytes, described: bytes) -> WRAPPED_EXCEPTION:
    try:
        failure: WRAPPED_EXCEPTION = pickle.loads(as_it_is)
    except Exception:  # noqa: BLE001 - a stranger's class may be missing here, or raise anything
        failure = pickle.loads(described)
    return failure
