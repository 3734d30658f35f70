"""Owns threads: runs jobs on a few of them under a byte budget, and loses no failure.

A job is a callable without arguments. What all jobs of one ``run`` share is a ``Cancellation``: the first
failure sets it, jobs look at it between steps, and whoever waits for the ``Budget`` is woken by it.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from holdfast.errors import UsageError

T = TypeVar("T")


class JobCancelledError(Exception):
    """A job stopped because another one failed. ``run`` raises that other failure, never this one."""


class Cancellation:
    """A flag that goes up once and stays up.

    Any thread may raise it. A job with many steps calls ``check`` before each of them, and so stops
    within one step of a failure elsewhere.
    """

    def __init__(self) -> None:
        # Budgets wait on this condition too: one notification reaches every waiter.
        self.changed = threading.Condition()
        self._up = False

    @property
    def cancelled(self) -> bool:
        """Whether the flag is up. Costs no lock."""
        return self._up

    def cancel(self) -> None:
        """Put the flag up, and wake everybody who waits for a budget."""
        with self.changed:
            self._up = True
            self.changed.notify_all()

    def check(self) -> None:
        """Raise JobCancelledError if the flag is up."""
        if self._up:
            raise JobCancelledError("This job stopped because another one failed or was interrupted.")


class Worker:
    """A thread whose end can be waited for even while interrupts come.

    ``Thread.join`` cannot: one that is interrupted (seen on Python 3.11) marks the thread as ended while it
    still runs, so that a later join returns at once.

    Args:
        target: What to run. It deals with its own exceptions.
        name: The thread's name.
    """

    def __init__(self, target: Callable[[], None], *, name: str) -> None:
        self._target = target
        self._started = False
        self._ended = threading.Event()
        # A daemon, so that a writer that nobody ends does not keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread. Raises RuntimeError where the system has none to give."""
        self._started = True
        try:
            self._thread.start()
        except RuntimeError:
            self._started = False
            raise

    def wait(self) -> None:
        """Return when the thread has ended. An interrupt is raised at once, and the thread goes on."""
        while self._started and not self._ended.wait(1.0):
            if not self._is_alive():
                return
        if self._started:
            self._thread.join()

    def _is_alive(self) -> bool:
        """Whether there is a thread: an interrupt in ``start`` may keep it from beginning, or from ``_run``.

        The system is asked. Python itself may be wrong about it after interrupts.
        """
        number = self._thread.native_id
        return number is not None and os.path.exists(f"/proc/self/task/{number}")

    def _run(self) -> None:
        try:
            self._target()
        finally:
            self._ended.set()


def wait_for_all(workers: Sequence[Worker]) -> None:
    """Return when all these threads have ended. An interrupt that comes meanwhile is raised only then."""
    try:
        for worker in workers:
            worker.wait()
    except KeyboardInterrupt:
        wait_for_all(workers)
        raise


class Budget:
    """Keeps the bytes that jobs hold together under a limit.

    Requests are admitted in the order in which they came, so a large one is not starved by small ones.
    One that is larger than the whole budget is admitted when nothing else is held: it takes longer, and
    never waits for ever. A thread must not ask for more while it holds some; two that do so can block
    each other.

    Args:
        nbytes: The limit.
        cancellation: Its flag makes waiting requests raise JobCancelledError.
    """

    def __init__(self, nbytes: int, cancellation: Cancellation | None = None) -> None:
        if nbytes < 1:
            raise UsageError(f"A byte budget must be 1 or more bytes, not {nbytes}.", found=nbytes)
        self.nbytes = nbytes
        self.held = 0
        self._cancellation = cancellation or Cancellation()
        self._changed = self._cancellation.changed
        self._waiting: deque[object] = deque()

    @contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        """Wait until ``nbytes`` fit, and hold them for the length of a with-block.

        Raises:
            JobCancelledError: The flag went up meanwhile; nothing is held.
        """
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                while self._waiting[0] is not ticket or (self.held and self.held + nbytes > self.nbytes):
                    self._cancellation.check()
                    self._changed.wait()
                self._cancellation.check()
                self.held += nbytes
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self.held -= nbytes
                self._changed.notify_all()


def run(
    jobs: Iterable[Callable[[], T]], *, threads: int, cancellation: Cancellation | None = None
) -> list[T]:
    """Run every job once and return their results in the order of the jobs.

    The first failure, of whatever kind, puts the flag up: jobs that have not started never do, those
    that run are waited for, and then that very exception is raised here; failures after it are in its
    notes. An interrupt of the caller does the same. No thread of ours is alive when this returns or
    raises; a job that never ends is therefore waited for without end.

    With one thread, or one job, everything runs in the calling thread.

    Args:
        jobs: Callables without arguments.
        threads: How many threads at most.
        cancellation: The flag, for jobs that look at it. If it goes up without a failure, this raises
            JobCancelledError.
    """
    todo = list(jobs)
    flag = cancellation or Cancellation()
    crew = _Crew(todo, flag)
    count = min(threads, len(todo))
    try:
        if count <= 1:
            crew.work()
        else:
            crew.work_on_threads(count)
        crew.raise_failure()
        return [crew.results[index] for index in range(len(todo))]
    finally:
        # A traceback refers to this frame; without this, failure and frame would keep each other alive,
        # and with them every buffer on the way.
        crew.failures.clear()


class _Crew(Generic[T]):
    """The state of one ``run``: what is next, what came out, what failed."""

    def __init__(self, jobs: Sequence[Callable[[], T]], flag: Cancellation) -> None:
        self._jobs = jobs
        self._flag = flag
        self._next = iter(range(len(jobs)))
        self._lock = threading.Lock()
        self.results: dict[int, T] = {}
        self.failures: list[BaseException] = []

    def work(self) -> None:
        """Take jobs until there are none left or the flag is up. Raises nothing but what is recorded."""
        while not self._flag.cancelled:
            with self._lock:
                index = next(self._next, None)
            if index is None:
                return
            try:
                self.results[index] = self._jobs[index]()
            except BaseException as error:  # noqa: BLE001 - SystemExit and MemoryError count too: A1
                self.failures.append(error)
                self._flag.cancel()

    def work_on_threads(self, count: int) -> None:
        workers = [Worker(self.work, name=f"holdfast-{n}") for n in range(count)]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.wait()
        except BaseException as error:  # noqa: BLE001 - an interrupt, or no more threads to be had
            self.failures.insert(0, error)
            self._flag.cancel()
            wait_for_all(workers)

    def raise_failure(self) -> None:
        """Raise the first failure with the later ones in its notes."""
        real = [error for error in self.failures if not isinstance(error, JobCancelledError)]
        if real:
            first = real[0]
            _add_notes(first, [f"Another job failed too: {error!r}" for error in real[1:]])
            try:
                raise first
            finally:
                del first, real
        if len(self.results) < len(self._jobs):
            self._flag.check()


def _add_notes(error: BaseException, notes: list[str]) -> None:
    # What add_note does, which Python 3.10 does not have.
    if notes:
        vars(error).setdefault("__notes__", []).extend(notes)
