"""Failures on their way between ranks: each arrives in some form, whatever its exception is.

The thread of the channel only passes them on as bytes. To pickle an exception, or to make it again, may
import a module, and that waits while the main thread saves in the middle of importing the same module.
"""

import pickle
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from holdfast._ranks.messages import Segments, decode, encode
from holdfast.errors import (
    WRAPPED_EXCEPTION,
    CheckpointException,
    RankLostError,
    RemoteError,
    portable_failure,
)

EVERY_RANK = "every rank of the process group must call it. (With no_dist=True a process works alone.)"
"""What to do if a rank has not called."""


class PackedFailure(NamedTuple):
    """What happened to a rank, in the form that is sent.

    Attributes:
        as_it_is: The pickled failure.
        described: A pickled description of it, for ranks that do not know the class of the exception.
        original: The failure itself, on the rank where it happened.
    """

    as_it_is: bytes
    described: bytes
    original: WRAPPED_EXCEPTION | None = None

    @classmethod
    def of(cls, failure: WRAPPED_EXCEPTION) -> "PackedFailure":
        """Pack a failure. Not for the thread of the channel, unless the exception is one of ours."""
        error, trace = failure
        described = RemoteError.from_exception(error), trace
        return cls(pickle.dumps(failure), pickle.dumps(described), failure)

    def unpacked(self) -> WRAPPED_EXCEPTION:
        """The failure; if this process does not know the class of its exception, its description."""
        if self.original is not None:
            return self.original
        try:
            failure: WRAPPED_EXCEPTION = pickle.loads(self.as_it_is)
        except Exception:  # noqa: BLE001 - a stranger's class may be missing here, or raise anything
            failure = pickle.loads(self.described)
        return failure


Failures: TypeAlias = dict[int, PackedFailure]


class SessionFailure(NamedTuple):
    """Why a session has failed: the same on every rank.

    Attributes:
        step: The name of the step that failed.
        failures: By rank, what happened to it.
    """

    step: str
    failures: Failures

    def to_raise(self) -> CheckpointException:
        """Return the exception that every rank raises for it. Not for the thread of the channel."""
        failures = {rank: packed.unpacked() for rank, packed in self.failures.items()}
        return CheckpointException.of(self.step, failures)


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
    error = RankLostError(f"rank {rank} is lost: {reason}", rank=rank)
    return {rank: PackedFailure.of((error, traceback.StackSummary()))}


def silent_rank(rank: int, timeout: float) -> Failures:
    """Return the failure of a step by a rank's silence."""
    return lost_rank(rank, f"no sign of life for {timeout:g} s. It is stopped, or its host is down")


def pack(failure: SessionFailure) -> Segments:
    """Return the failure as segments."""
    step, failures = failure
    return encode((step, {rank: tuple(packed[:2]) for rank, packed in failures.items()}))


def unpack(segments: Segments) -> SessionFailure:
    """Return the failure that :func:`pack` was given. Imports nothing."""
    step, forms = decode(segments)
    return SessionFailure(step, {rank: PackedFailure(*both) for rank, both in forms.items()})
