"""How a process ends while saves run in the background, or after one has failed and nobody has seen it.

The interpreter waits for the threads of saves by itself. This module reports failures that nobody has seen,
with an exit status that is not zero, and gives saves time after SIGTERM.
"""

import atexit
import ctypes
import os
import signal
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any

from holdfast._background.exit_notice import announce_waits_at_exit, await_all
from holdfast._background.running_save import RunningSave
from holdfast._background.running_saves import running_saves
from holdfast.errors import UsageError

GRACE_VARIABLE = "HOLDFAST_GRACE_PERIOD"

# How long a cancelled save may take to remove its files before the process ends anyway.
_CANCEL_SECONDS = 5.0


class _Grace:
    """How long saves may go on after SIGTERM; None until it has been set."""

    seconds: float | None = None


def set_grace_period(seconds: float) -> None:
    """Set how long saves in the background may go on after SIGTERM before they are cancelled.

    With 0, the default, SIGTERM ends the process at once as it always does: what was saved before is there,
    whole. Otherwise the process goes on, training included, until its saves are done or the time is over;
    those that are not done are cancelled, what they wrote is removed, and the process ends by SIGTERM.
    The environment variable ``HOLDFAST_GRACE_PERIOD`` sets it for programs that do not call this.

    It must be called in the main thread. If the program has its own SIGTERM handler, that handler stays in
    place and the grace period has no effect; if it calls ``sys.exit``, Python waits for the saves. Not
    guaranteed: a main thread that stays in native code, where Python runs no handler.

    Raises:
        UsageError: ``seconds`` is negative, or this is not the main thread.
    """
    if not seconds >= 0:
        raise UsageError(f"a grace period must be 0 or more seconds, not {seconds!r}", found=seconds)
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("set_grace_period must be called in the main thread, as signal.signal must")
    _Grace.seconds = seconds
    handler = signal.getsignal(signal.SIGTERM)
    if seconds > 0 and handler is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)
    elif not seconds and handler is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def prepare_for_shutdown() -> None:
    """Read the grace period from the environment, once, and handle SIGTERM if there is one.

    The end of the program will say which saves it waits for.

    Every save in the background calls this when it begins.

    Raises:
        UsageError: The environment variable is not a number of seconds.
    """
    announce_waits_at_exit()
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


def is_grace_handler(handler: object) -> bool:
    """Whether a handler of SIGTERM is the one of the grace period, which ends the process."""
    return handler is _on_sigterm


def _on_sigterm(number: int, frame: types.FrameType | None) -> None:  # noqa: ARG001 - the form of a handler
    # In a thread, because this one may hold a lock that a save needs.
    threading.Thread(
        target=_leave,
        args=(running_saves.running(), _Grace.seconds or 0.0),
        name="holdfast-shutdown",
        daemon=True,
    ).start()


def _leave(saves: Sequence[RunningSave], grace: float) -> None:
    if not await_all(saves, grace):
        for save in saves:
            save.cancel()
        await_all(saves, _CANCEL_SECONDS)
    # Only the main thread may do this through Python, and it may be in native code for hours.
    ctypes.pythonapi.PyOS_setsig(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)


class _LastFlush:
    """A standard error whose very last flush fails, by which Python ends with the status 120.

    A function at exit cannot change the status, and ``os._exit`` would skip all others.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def flush(self) -> None:
        """Fail when the interpreter itself asks, once it is being taken down; flush for everybody else."""
        if self._stream is not None:
            self._stream.flush()
        if sys.is_finalizing():
            raise ValueError("a save in the background has failed")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@atexit.register
def _report_unseen_failures() -> None:
    """Runs when all threads of saves have ended."""
    unseen = running_saves.unseen()
    for save in unseen:
        save.looked_at = True
        if sys.stderr is not None:
            sys.stderr.write(
                f"holdfast: the save to {save.place} in the background failed, and nobody looked at its "
                f"future; the checkpoint was NOT saved:\n{save.error}\n"
            )
    if unseen:
        sys.stderr = _LastFlush(sys.stderr)
