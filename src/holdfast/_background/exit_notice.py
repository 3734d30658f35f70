"""Says what a program waits for when it ends while saves run in the background."""

import contextlib
import functools
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence

from holdfast._background.running_save import RunningSave
from holdfast._background.running_saves import running_saves
from holdfast.progress_display import in_words

_FIRST = 1.0
"""Seconds before rank 0 says anything: a short wait needs no words."""

_AGAIN = 10.0
"""Seconds between two notices; and before other ranks than rank 0 say anything."""


@functools.cache
def announce_waits_at_exit() -> None:
    """Have the end of the program say which saves it waits for. Calling it again does nothing.

    Python waits for the threads of saves in silence, also after Ctrl-C.
    """
    # What is registered here runs before Python waits for threads; what ``atexit`` has, after that. The
    # function has no public name; without it the wait is the same, and silent.
    register: Callable[..., None] | None = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(_begin_to_speak)


def _begin_to_speak() -> None:
    # In a thread: a save may wait for the end of the main thread, which must not wait for the save here.
    with contextlib.suppress(RuntimeError):  # no thread is to be had at the end of the interpreter
        threading.Thread(
            target=await_all, args=(running_saves.running(),), name="holdfast-exit-notice", daemon=True
        ).start()


def await_all(saves: Sequence[RunningSave], seconds: float = math.inf) -> bool:
    """Wait until saves have ended, and say now and then which have not. False if the time was over first."""
    began = time.monotonic()
    for save in saves:
        pause = _FIRST if save.rank == 0 else _AGAIN
        while not save.ended.wait(max(0.0, min(pause, began + seconds - time.monotonic()))):
            if time.monotonic() - began >= seconds:
                return False
            _say(save)
            pause = _AGAIN
    return True


def _say(save: RunningSave) -> None:
    if sys.stderr is not None:
        sys.stderr.write(
            f"holdfast: the program ends when the save to {save.place} in the background has: "
            f"{in_words(save.progress())}\n"
        )
        sys.stderr.flush()
