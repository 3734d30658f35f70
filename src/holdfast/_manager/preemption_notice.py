"""Notices signals of pre-emption without ending the process."""

import mmap
import os
import signal
import threading
import time
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data._utils import signal_handling

from holdfast._background.shutdown import is_grace_handler
from holdfast.errors import UsageError

_PARENT_SECONDS = 0.5
"""How long a forked child waits to see whether its parent got the signal, too."""

_notices: "weakref.WeakSet[PreemptionNotice]" = weakref.WeakSet()
"""Those of this process, and of the one that it was forked from."""


class PreemptionNotice:
    """Remembers that one of some signals came to this process. Must be made in the main thread.

    A handler that the program had before is called, too. The one of ``set_grace_period`` is not, because it
    would end the process.

    A scheduler sends the signal to all processes of a job, forked workers among them. A forked child ignores
    it once if its parent got it as well, so that the parent can save. Otherwise it does what it would have
    done without this: ``Process.terminate()`` works. So do the workers of a DataLoader, although torch gives
    them handlers in C that end them.

    Args:
        signals: The signals.

    Raises:
        UsageError: This is not the main thread.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("a manager with when=Preempted() must be made in the main thread")
        self._owner = os.getpid()
        self._is_closed = False
        self._came = mmap.mmap(-1, 1)  # forked children share it
        self._previous: dict[int, Any] = {}
        for number in set(signals):  # twice the same would make us our own previous handler
            self._previous[number] = signal.signal(number, self._on_signal)
        _notices.add(self)
        _keep_handlers_in_data_loaders()

    @property
    def has_come(self) -> bool:
        """Whether a signal has come to this process."""
        return self._came[0] != 0

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        previous = self._handler_before(number)
        if self._is_closed and signal.getsignal(number) == self._on_signal:
            # It was closed by another thread, which cannot put handlers back.
            signal.signal(number, previous)
            os.kill(os.getpid(), number)
            return
        if os.getpid() != self._owner:
            self._ignore_once(number, previous)
        else:
            self._came[0] = 1
        if callable(previous) and not is_grace_handler(previous):
            previous(number, frame)

    def _handler_before(self, number: int) -> Callable[[int, Any], Any] | int:
        """The handler that the program had before, and not one of another notice that was closed since."""
        found = self._previous.get(number)
        other = getattr(found, "__self__", None)
        if isinstance(other, PreemptionNotice) and other._is_closed:  # noqa: SLF001 - its own class
            return other._handler_before(number)  # noqa: SLF001
        return signal.SIG_DFL if found is None else found

    def _ignore_once(self, number: int, previous: Callable[[int, Any], Any] | int) -> None:
        signal.signal(number, previous)
        give_up_at = time.monotonic() + _PARENT_SECONDS
        while not self.has_come and time.monotonic() < give_up_at:
            time.sleep(0.01)
        if not self.has_come and not callable(previous):
            os.kill(os.getpid(), number)

    def set_handlers_again(self) -> None:
        """Set the handlers again in a forked child, where torch has replaced them."""
        for number in self._previous if not self._is_closed else ():
            signal.signal(number, self._on_signal)

    def close(self) -> None:
        """Put the handlers back that were there before, unless somebody has replaced ours since."""
        if os.getpid() != self._owner:
            return
        self._is_closed = True
        if threading.current_thread() is not threading.main_thread():
            return  # the next signal does it
        for number in self._previous:
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, self._handler_before(number))


def _keep_handlers_in_data_loaders() -> None:
    """Let forked workers of DataLoaders keep our handlers. torch replaces them as soon as a worker begins."""
    handling: Any = signal_handling
    set_those_of_torch = handling._set_worker_signal_handlers  # noqa: SLF001 - there is no other way
    if getattr(set_those_of_torch, "keeps_handlers", False):
        return

    def set_handlers() -> None:
        set_those_of_torch()
        for notice in _notices:
            notice.set_handlers_again()

    set_handlers.keeps_handlers = True  # type: ignore[attr-defined]
    handling._set_worker_signal_handlers = set_handlers  # noqa: SLF001


def ignore_preemption(worker_id: int = 0) -> None:  # noqa: ARG001 - a DataLoader passes it
    """Ignore the first SIGTERM in this process: for workers of a DataLoader that are spawned.

    A scheduler sends the signal to all processes of a job. A worker that ends before the save makes the
    training fail. Forked workers need nothing, because they know whether their parent was signalled. Those
    with ``multiprocessing_context="spawn"`` need this. The second SIGTERM ends the worker. It does not help
    with ``"forkserver"``: the signal ends the server, and with it all workers.

    Example:
        >>> spawned = {"multiprocessing_context": "spawn", "worker_init_fn": ignore_preemption}
        >>> DataLoader(dataset, num_workers=4, **spawned)
    """

    def ignore(number: int, _: types.FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, ignore)
