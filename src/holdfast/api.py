"""The error of a failed step, and how ranks tell each other of it, under the name of torch's module."""

import traceback
from typing import Any

from holdfast.errors import WRAPPED_EXCEPTION, CheckpointException, portable_trace

__all__ = ["WRAPPED_EXCEPTION", "CheckpointException"]


def _wrap_exception(exc: BaseException) -> WRAPPED_EXCEPTION:
    """An error with the place where it was raised, as one rank reports it to the others."""
    return exc, portable_trace(traceback.extract_tb(exc.__traceback__))


def _is_wrapped_exception(obj: Any) -> bool:
    """Whether a value is what ``_wrap_exception`` returns."""
    return (
        isinstance(obj, tuple)
        and len(obj) == 2
        and isinstance(obj[0], BaseException)
        and isinstance(obj[1], traceback.StackSummary)
    )
