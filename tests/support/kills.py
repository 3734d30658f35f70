"""Real kills: a process that kills itself at a given call that changes the file system."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

CALLS = ["open", "pwritev", "pwrite", "write", "fsync", "fdatasync", "close", "ftruncate"]
CALLS += ["mkdir", "rename", "replace", "link", "unlink", "remove", "rmdir"]


class Killer:
    """Kills its process before or after the n-th of the calls that change a file system."""

    def __init__(self, at: int, report: int) -> None:
        self.at = at
        self.report = report
        self.count = 0
        self.lock = threading.Lock()
        for name in CALLS:
            setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return call(*args, **kwargs)
            self._step(f"before {name}")
            result = call(*args, **kwargs)
            self._step(f"after {name}")
            return result

        return watched

    def _step(self, what: str) -> None:
        with self.lock:
            self.count += 1
            if self.count == self.at:
                _WRITE(self.report, what.encode())
                os.kill(os.getpid(), signal.SIGKILL)


_WRITE = os.write


def run_and_kill(work: Callable[[], None], kill_at: int) -> str | None:
    """Run ``work`` in a fork that kills itself; the point at which it did, or None if it came to its end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            Killer(kill_at, writing)
            work()
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as report:
        point = report.read()
    status = os.waitpid(child, 0)[1]
    if status == 0:
        return None
    assert status == signal.SIGKILL, f"the victim ended by itself with status {status}"
    return point
