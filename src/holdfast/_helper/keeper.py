"""Owns the helper process of this trainer: its start, its requests, its end, and the next one after that."""

import atexit
import contextlib
import itertools
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

from holdfast._helper.birth import DEAF_TO, PROGRAM
from holdfast._helper.frames import PROTOCOL, READY, REQUEST, Frame, receive, send
from holdfast._helper.slate import Slate, Slot, make_nameless_file
from holdfast._version import __version__
from holdfast.errors import StorageError

__all__ = ["Helper", "kill_helper", "ready_helper", "start_helper", "stop_helper"]

Answer = Callable[[Frame | None, Exception | None], None]
"""Told how a request ended: by a frame of the helper's, or by an error because the helper is gone."""

_LAST_WORDS = 16 << 10
_STOP_SECONDS = 10.0
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Helper:
    """One helper process, from its start to its end. Any thread may use it.

    Its thread makes the process, because the system ends the process with the thread that made it; then it
    waits for messages, which costs nothing while there are none.
    """

    def __init__(self) -> None:
        self.pid: int | None = None
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._waiting: dict[int, Answer] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: StorageError | None = None
        self._is_stopping = False
        self._known = threading.Event()
        slate = make_nameless_file("slate")
        self._stderr = make_nameless_file("helper-stderr")
        self._slate = Slate(slate)
        self._link, theirs = socket.socketpair()
        self._thread = threading.Thread(
            target=self._keep, args=(theirs, slate), name="holdfast-helper", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:
            theirs.close()
            os.close(slate)
            self.let_go()
            raise

    def wait_until_ready(self) -> None:
        """Return when the process has said that it can work.

        Raises:
            StorageError: It could not start, is of another version, or has ended since.
        """
        self._known.wait()
        if self._failure is not None:
            raise _fresh(self._failure)

    @property
    def has_ended(self) -> bool:
        """Whether it takes no more requests."""
        process = self._process
        return self._failure is not None or (process is not None and process.poll() is not None)

    def submit(self, body: list[bytes | memoryview], fd: int, answer: Answer) -> Slot:
        """Have a write carried out; ``answer`` is called once, by the helper's thread, with what came of it.

        Returns:
            Where its progress can be seen, and where it can be cancelled.
        """
        with self._lock:
            if self._failure is not None:
                raise _fresh(self._failure)
            number = next(self._numbers)
            self._waiting[number] = answer
        slot = self._slate.slot(number)
        slot.clear()
        facts = {"log_level": logging.getLogger("holdfast").getEffectiveLevel(), "folder": _folder()}
        about = pickle.dumps(facts)
        with self._sending, contextlib.suppress(OSError):  # if the helper is gone, our thread tells why
            send(self._link, REQUEST, number, [len(about).to_bytes(8, "little"), about, *body], [fd])
        return slot

    def kill(self) -> None:
        """End the process at once, also one that is stopped; whoever waits for it is told."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """End the process, which stops writing at once, and return when it is gone. Twice is fine."""
        self._is_stopping = True
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            self.kill()
            self._thread.join()

    def let_go(self) -> None:
        """Close our ends. For the thread's own end, and for a forked child, whose helper this is not."""
        self._link.close()
        if self._stderr >= 0:
            os.close(self._stderr)
            self._stderr = -1

    def _keep(self, theirs: socket.socket, slate: int) -> None:
        # The process inherits this: a key pressed in the terminal must not meet it half awake.
        signal.pthread_sigmask(signal.SIG_BLOCK, DEAF_TO)
        failure: StorageError | None = None
        try:
            with theirs:
                self._process = _spawn(theirs.fileno(), slate, self._stderr)
            self.pid = self._process.pid
            self._receive_all()
        except Exception as error:  # noqa: BLE001 - the system may have no process to give
            failure = StorageError(
                f"the helper process that writes checkpoints could not be started: {error}"
            )
            failure.__cause__ = error
        finally:
            os.close(slate)
        self._end(failure or self._reason())

    def _receive_all(self) -> None:
        while (frame := receive(self._link)) is not None:
            if frame.kind == READY:
                found = pickle.loads(frame.body)
                if (found["protocol"], found["version"]) != (PROTOCOL, __version__):
                    raise RuntimeError(f"it is holdfast {found['version']}, and this is {__version__}")
                self._known.set()
                continue
            with self._lock:
                answer = self._waiting.pop(frame.number)
            answer(frame, None)
            del frame, answer  # while waiting for the next one nothing of the last is held

    def _reason(self) -> StorageError:
        """Why the process is gone, or will be when this returns."""
        assert self._process is not None
        status = self._process.wait()
        how = f"ended with the status {status}"
        if status < 0:
            how = f"was killed by {_signal_name(-status)}"
            if status == -signal.SIGKILL:
                how += " (which the system does when memory runs out)"
        if self._is_stopping:
            how = "was stopped by this process"
        if self._known.is_set():
            return StorageError(
                f"the helper process {self.pid} that writes checkpoints {how}. What it was writing is not "
                "committed; the next save starts another one."
            )
        said = os.pread(self._stderr, _LAST_WORDS, max(0, os.fstat(self._stderr).st_size - _LAST_WORDS))
        words = said.decode(errors="replace").strip() or "nothing"
        return StorageError(
            f"the helper process that writes checkpoints {how} before it was ready. It said: {words}"
        )

    def _end(self, failure: StorageError) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        with self._lock:
            self._failure = failure
            waiting, self._waiting = self._waiting, {}
        with self._sending:
            self.let_go()
        self._known.set()
        for answer in waiting.values():
            answer(None, _fresh(failure))


def _fresh(failure: StorageError) -> StorageError:
    """The same error for one who raises it, who adds a traceback of his own."""
    made = StorageError(str(failure))
    made.__cause__ = failure.__cause__
    return made


def _spawn(link: int, slate: int, stderr: int) -> "subprocess.Popen[bytes]":
    """Start the process by a program of our own: what multiprocessing starts runs the caller's main again."""
    try:
        ours = os.dup(2)
    except OSError:
        ours = os.open(os.devnull, os.O_WRONLY)
    described = {
        "parent": os.getpid(),
        "link": link,
        "slate": slate,
        "stderr": ours,
        "modules": [name for name in sys.modules if name.startswith("holdfast.") and ".testing" not in name],
    }
    executable: Any = spawn.get_executable()
    try:
        return subprocess.Popen(  # noqa: S603 - our own interpreter and program
            [os.fsdecode(executable), "-c", PROGRAM, json.dumps(described), "\n".join(sys.path)],
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=(link, slate, ours),
            env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1")},
        )
    finally:
        os.close(ours)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


_current: Helper | None = None
_choosing = threading.Lock()
_of_the_parent: list[Helper] = []


def start_helper(*, wait: bool = True) -> int | None:
    """Start the helper of this process, unless it is there.

    Starting takes as long as ``import torch``. Call it early with ``wait=False`` and the first save need not
    wait.

    Args:
        wait: Return only when it is ready.

    Returns:
        Its process id; None if it is not known yet.

    Raises:
        StorageError: It could not start; the message has what it printed.
    """
    return ready_helper().pid if wait else _chosen().pid


def ready_helper() -> Helper:
    """The helper of this process, alive as far as one can know.

    Raises:
        StorageError: It could not start; the message has what it printed.
    """
    helper = _chosen()
    helper.wait_until_ready()
    return helper


def _chosen() -> Helper:
    global _current  # noqa: PLW0603 - one helper in each process is the point
    with _choosing:
        if _current is None or _current.has_ended:
            _current = Helper()
        return _current


def stop_helper() -> None:
    """End the helper of this process, whatever it does, and return when it is gone."""
    global _current
    with _choosing:
        helper, _current = _current, None
    if helper is not None:
        helper.stop()


def kill_helper() -> None:
    """Kill the helper of this process, also a stopped one: its saves fail, and the next starts another."""
    helper = _current
    if helper is not None:
        helper.kill()


def _forget_after_fork() -> None:
    # A child that sends to its parent's helper would mix the messages, and one that holds the socket would
    # keep the helper from noticing the parent's end.
    global _current, _choosing
    if _current is not None:
        _current.let_go()
        _of_the_parent.append(_current)
    _current, _choosing = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(stop_helper)
