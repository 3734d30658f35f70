"""The trainer's end of its writer process: starts it, sends requests to it, and replaces one that died."""

import atexit
import contextlib
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from multiprocessing import spawn
from typing import Any

from holdfast._ranks.sockets import no_fork, open_pair
from holdfast._staging.anonymous_file import make_anonymous_file
from holdfast._version import __version__
from holdfast._writer_process import process_messages as messages
from holdfast._writer_process.process_messages import ProcessMessage
from holdfast._writer_process.process_start import IGNORED_SIGNALS, PROGRAM
from holdfast._writer_process.shared_progress import ProgressSlot, SharedProgress
from holdfast.errors import StorageError

_QUOTED_NBYTES = 16 << 10
_STOP_SECONDS = 10.0
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class WriterProcess:
    """One writer process, from its start to its end. Any thread may use this object.

    A thread of its own starts the process, because the system kills the process when the thread that started
    it ends. Then the thread waits for messages.

    Attributes:
        pid: The process id; None until it is known.
    """

    def __init__(self) -> None:
        self.pid: int | None = None
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._waiting: dict[int, Future[ProcessMessage]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: StorageError | None = None
        self._is_stopping = False
        self._known = threading.Event()
        with contextlib.ExitStack() as undo:
            # A forked child must keep neither end open, or the end of the other process is never noticed.
            self._link, theirs = (undo.enter_context(end) for end in open_pair())
            progress = make_anonymous_file("progress")
            undo.callback(os.close, progress)
            self._progress = SharedProgress(progress)
            self._stderr = make_anonymous_file("writer-stderr")
            undo.callback(self.close_descriptors)
            self._thread = threading.Thread(
                target=self._run, args=(theirs, progress), name="holdfast-writer-process", daemon=True
            )
            self._thread.start()
            undo.pop_all()

    def wait_until_ready(self) -> None:
        """Wait until the process can take requests.

        Raises:
            StorageError: It could not start, has another version, or has ended since.
        """
        self._known.wait()
        if self._failure is not None:
            raise _copied(self._failure)

    @property
    def has_ended(self) -> bool:
        """Whether it takes no more requests."""
        process = self._process
        return self._failure is not None or (process is not None and process.poll() is not None)

    def submit(self, body: list[bytes], fd: int) -> tuple[ProgressSlot, "Future[ProcessMessage]"]:
        """Send a request.

        Args:
            body: A packed request.
            fd: The descriptor of the staged memory.

        Returns:
            The slot that has its progress and can cancel it, and a future of the answer. The future raises
            StorageError if the process ends before it has answered.
        """
        answer: Future[ProcessMessage] = Future()
        with self._lock:
            if self._failure is not None:
                raise _copied(self._failure)
            number = next(self._numbers)
            self._waiting[number] = answer
        slot = self._progress.slot(number)
        slot.clear()
        with self._sending, contextlib.suppress(OSError):  # the process is gone: our thread fails the future
            messages.send(self._link, messages.REQUEST, number, body, [fd])
        return slot, answer

    def kill(self) -> None:
        """Kill the process, even one that is stopped. The futures of its requests fail."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """End the process, which stops writing at once, and wait until it is gone. May be called twice."""
        self._is_stopping = True
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            self.kill()
            self._thread.join()

    def close_descriptors(self) -> None:
        """Close the descriptors that this process has of it. A forked child does that too."""
        self._link.close()
        if self._stderr >= 0:
            os.close(self._stderr)
            self._stderr = -1

    def _run(self, theirs: socket.socket, progress: int) -> None:
        # The process inherits this mask, so that Ctrl-C cannot end it before it ignores the signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        failure: StorageError | None = None
        try:
            with theirs:
                self._process = _spawn(theirs.fileno(), progress, self._stderr)
            self.pid = self._process.pid
            self._receive_all()
        except Exception as error:  # noqa: BLE001 - the futures of all requests raise it
            failure = StorageError(
                f"the writer process, which writes checkpoints, could not be started: {error}"
            )
            failure.__cause__ = error
        finally:
            os.close(progress)
        self._end(failure or self._reason())

    def _receive_all(self) -> None:
        while (message := messages.receive(self._link)) is not None:
            if message.kind == messages.READY:
                protocol, version = pickle.loads(message.body)
                if (protocol, version) != (messages.PROTOCOL, __version__):
                    raise RuntimeError(f"it has holdfast {version}, and the trainer has {__version__}")
                self._known.set()
                continue
            with self._lock:
                answer = self._waiting.pop(message.number)
            answer.set_result(message)
            del message, answer  # or they would be held until the next message

    def _reason(self) -> StorageError:
        """Wait for the end of the process, and describe why it ended."""
        assert self._process is not None
        status = self._process.wait()
        if self._is_stopping:
            how = "was stopped by the trainer"
        elif status == -signal.SIGKILL:
            how = "was killed by SIGKILL (which the system does when memory runs out)"
        elif status < 0:
            how = f"was killed by signal {-status} ({signal.strsignal(-status)})"
        else:
            how = f"ended with the status {status}"
        if self._known.is_set():
            return StorageError(
                f"the writer process {self.pid}, which writes checkpoints, {how}. Its save is not committed; "
                "the next save starts another writer process."
            )
        size = os.fstat(self._stderr).st_size
        printed = os.pread(self._stderr, _QUOTED_NBYTES, max(0, size - _QUOTED_NBYTES))
        words = printed.decode(errors="replace").strip() or "nothing"
        return StorageError(
            f"the writer process, which writes checkpoints, {how} before it was ready. It printed: {words}"
        )

    def _end(self, failure: StorageError) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        with self._lock:
            self._failure = failure
            waiting, self._waiting = self._waiting, {}
        with self._sending:
            self.close_descriptors()
        self._known.set()
        for answer in waiting.values():
            answer.set_exception(_copied(failure))


def _copied(failure: StorageError) -> StorageError:
    """An equal error: each caller that raises one adds a traceback of its own."""
    made = StorageError(str(failure))
    made.__cause__ = failure.__cause__
    return made


def _spawn(link: int, progress: int, stderr: int) -> "subprocess.Popen[bytes]":
    """Start the process. Not by multiprocessing, which would run the main module of the caller again."""
    try:
        our_stderr = os.dup(2)
    except OSError:
        our_stderr = os.open(os.devnull, os.O_WRONLY)
    description = {
        "parent": os.getpid(),
        "link": link,
        "progress": progress,
        "stderr": our_stderr,
        "modules": [name for name in sys.modules if name.startswith("holdfast.") and ".testing" not in name],
    }
    executable: Any = spawn.get_executable()
    try:
        # A child that is forked meanwhile would keep the pipe open at whose end Popen waits.
        with no_fork:
            return subprocess.Popen(  # noqa: S603 - our own interpreter and program
                [os.fsdecode(executable), "-c", PROGRAM, json.dumps(description), "\n".join(sys.path)],
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=(link, progress, our_stderr),
                env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1")},
            )
    finally:
        os.close(our_stderr)


_current: WriterProcess | None = None
_choosing = threading.Lock()
_of_the_parent: list[WriterProcess] = []


def start_writer_process(*, wait: bool = True) -> int | None:
    """Start the writer process of this process, unless it runs.

    Starting takes as long as ``import torch``. If you call this early with ``wait=False``, the first save
    does not have to wait for it.

    Args:
        wait: Return only when the process is ready.

    Returns:
        Its process id; None if it is not known yet.

    Raises:
        StorageError: The process could not start; the message has what it printed.
    """
    return ready_writer_process().pid if wait else _running().pid


def ready_writer_process() -> WriterProcess:
    """The writer process of this process, started if there is none, once it is ready.

    Raises:
        StorageError: The process could not start; the message has what it printed.
    """
    process = _running()
    process.wait_until_ready()
    return process


def _running() -> WriterProcess:
    global _current  # noqa: PLW0603 - each trainer has one writer process
    with _choosing:
        if _current is None or _current.has_ended:
            _current = WriterProcess()
        return _current


def stop_writer_process() -> None:
    """End the writer process, even while it writes, and wait until it is gone."""
    global _current
    with _choosing:
        process, _current = _current, None
    if process is not None:
        process.stop()


def _forget_after_fork() -> None:
    # A child that used the parent's socket would mix up the messages.
    global _current, _choosing
    if _current is not None:
        _current.close_descriptors()
        _of_the_parent.append(_current)
    _current, _choosing = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(stop_writer_process)
