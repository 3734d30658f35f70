"""How a process ends while saves run in the background, or after one has failed unseen.

The interpreter waits for the threads of saves by itself. What is left is to say what nobody has seen, with an
exit status that is not zero, and to give a save the time that SIGTERM leaves it.
"""

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Sequence
from typing import Any

from holdfast._engine.request import Request
from holdfast._engine.roster import roster
from holdfast.errors import UsageError

__all__ = ["GRACE_VARIABLE", "expect_the_end", "set_grace_period"]

GRACE_VARIABLE = "HOLDFAST_GRACE_PERIOD"

# What abandoning takes: removing files that were being written. Longer than that nobody is waited for.
_PATIENCE = 5.0


class _Grace:
    """How long a save may go on after SIGTERM; None until somebody has said so."""

    seconds: float | None = None


def set_grace_period(seconds: float) -> None:
    """How long saves in the background may go on after SIGTERM before they are given up.

    With 0, the default, SIGTERM ends the process at once as it always does: what was saved before is there,
    whole. Otherwise the process goes on, training included, until its saves are done or the time is over;
    those that are not done are given up, what they wrote is removed, and the process ends by SIGTERM.
    The environment variable ``HOLDFAST_GRACE_PERIOD`` sets it for programs that do not call this.

    To be called in the main thread. A handler that the program has for SIGTERM is never replaced: it decides,
    and a program that leaves by it, with ``sys.exit`` say, waits for its saves. Not guaranteed: a main thread
    that stays in native code, where no handler of Python's runs.

    Raises:
        UsageError: ``seconds`` is negative, or this is not the main thread.
    """
    if not seconds >= 0:
        raise UsageError(f"a grace period must be 0 or more seconds, not {seconds!r}", found=seconds)
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("set_grace_period must be called in the main thread, as signal.signal must")
    _Grace.seconds = seconds
    if seconds > 0:
        _take_signal()
    elif signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def expect_the_end() -> None:
    """Called when a save begins: read the environment, once, and listen for SIGTERM if that asks for it.

    Raises:
        UsageError: The environment variable is not a number of seconds.
    """
    if _Grace.seconds is not None:
        return
    said = os.environ.get(GRACE_VARIABLE, "0")
    try:
        seconds = float(said)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise UsageError(f"{GRACE_VARIABLE} must be a number of seconds, not {said!r}", found=said)
    if threading.current_thread() is threading.main_thread():
        set_grace_period(seconds)


def _take_signal() -> None:
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(number: int, frame: types.FrameType | None) -> None:  # noqa: ARG001 - the form of a handler
    # In a thread, because this one may hold a lock that a save needs.
    threading.Thread(
        target=_leave, args=(roster.running(), _Grace.seconds or 0.0), name="holdfast-farewell", daemon=True
    ).start()


def _leave(requests: Sequence[Request], grace: float) -> None:
    if not _all_end(requests, grace):
        for request in requests:
            request.cancel()
        _all_end(requests, _PATIENCE)
    # Only the main thread may do this through Python, and it may be in native code for hours.
    ctypes.pythonapi.PyOS_setsig(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)


def _all_end(requests: Sequence[Request], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    return all(request.ended.wait(max(0.0, deadline - time.monotonic())) for request in requests)


class _LastFlush:
    """A standard error whose very last flush fails, by which Python ends with the status 120.

    A function at exit cannot change the status, and ``os._exit`` would skip all others.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def flush(self) -> None:
        """Fail when the interpreter itself asks, which has no frame; flush for everybody else."""
        if self._stream is not None:
            self._stream.flush()
        sys._getframe(1)  # noqa: SLF001 - ValueError without a caller

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@atexit.register
def _say_what_nobody_has_seen() -> None:
    """Runs when all threads of saves have ended."""
    unseen = roster.unseen()
    for request in unseen:
        request.looked_at = True
        if sys.stderr is not None:
            sys.stderr.write(
                f"holdfast: the save to {request.place} in the background failed, and nobody looked at its "
                f"future; the checkpoint was NOT saved:\n{request.error}\n"
            )
    if unseen:
        sys.stderr = _LastFlush(sys.stderr)
