"""Failures on their way between ranks: they arrive in some form, whatever their exceptions are."""

import pickle
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from holdfast._ranks.frames import Segments, decode, encode
from holdfast.errors import WRAPPED_EXCEPTION, RankLostError, RemoteError, portable_failure

__all__ = [
    "Failures",
    "SessionFailedError",
    "Verdict",
    "attempt",
    "lost_rank",
    "pack",
    "silent_rank",
    "unpack",
]

Failures: TypeAlias = dict[int, WRAPPED_EXCEPTION]


class Verdict(NamedTuple):
    """Why a session has failed: the same on every rank.

    Attributes:
        step: The step that failed, by name.
        failures: What happened to whom.
    """

    step: str
    failures: Failures


class SessionFailedError(Exception):
    """A session has failed; inside this package only, where it becomes a CheckpointException.

    Attributes:
        verdict: Why.
        is_told: Whether the coordinator said so; False if this rank concluded it from its silence or loss.
    """

    def __init__(self, verdict: Verdict, *, is_told: bool = True) -> None:
        super().__init__(verdict)
        self.verdict = verdict
        self.is_told = is_told


def attempt(work: Callable[[], Any]) -> tuple[Any, WRAPPED_EXCEPTION | None]:
    """What ``work`` returns, or how it failed, in a form that travels. Interrupts pass."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - whatever it is, every rank shall learn of it
        return None, portable_failure((error, traceback.extract_tb(error.__traceback__)))


def lost_rank(rank: int, reason: str) -> Failures:
    """The failure of a step by the loss of a rank."""
    return {rank: (RankLostError(f"rank {rank} is lost: {reason}", rank=rank), traceback.StackSummary())}


def silent_rank(rank: int, timeout: float) -> Failures:
    """The failure of a step by a rank's silence."""
    return lost_rank(rank, f"no sign of life for {timeout:g} s. It is stopped, or its host is down")


def pack(verdict: Verdict) -> Segments:
    """A verdict as segments; each failure twice, as it is and in words."""
    step, failures = verdict
    forms = {rank: (pickle.dumps(f), pickle.dumps(_in_words(f))) for rank, f in failures.items()}
    return encode((step, forms))


def unpack(segments: Segments) -> Verdict:
    """The verdict; a failure whose class this process does not know, in words."""
    step, forms = decode(segments)
    return Verdict(step, {rank: _first_that_loads(*both) for rank, both in forms.items()})


def _in_words(failure: WRAPPED_EXCEPTION) -> WRAPPED_EXCEPTION:
    error, trace = failure
    return RemoteError.from_exception(error), trace


def _first_that_loads(as_it_is: bytes, in_words: bytes) -> WRAPPED_EXCEPTION:
    try:
        failure: WRAPPED_EXCEPTION = pickle.loads(as_it_is)
    except Exception:  # noqa: BLE001 - a stranger's class may be missing here, or raise anything
        failure = pickle.loads(in_words)
    return failure
