"""The first steps of the writer process: it ends with its parent, ignores signals, and lowers its priority.

This module runs before torch is imported, so that nothing is left if the parent dies during the import.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import logging
import os
import signal
import socket
import sys
from typing import Any

from holdfast._writer_process.shared_progress import SharedProgress

PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2].split(chr(10)); "
    "from holdfast._writer_process.process_start import main; main(sys.argv[1])"
)
"""What the interpreter of the writer process runs. It does not run the caller's ``__main__`` again, and it
imports nothing from the working folder before it has the caller's ``sys.path``."""

IGNORED_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Signals that go to all processes of a terminal or a job. The parent decides whether the save is finished
then, and the writer process ends with the parent."""

_PR_SET_PDEATHSIG = 1


def main(description: str) -> None:
    """Become a writer process. Never returns: the process ends instead.

    Args:
        description: JSON with ``parent`` (a process id), ``link``, ``progress`` and ``stderr`` (descriptors),
            and ``modules`` (the names of modules to import).
    """
    facts: dict[str, Any] = json.loads(description)
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _end_with(facts["parent"])
    progress = SharedProgress(facts["progress"])
    os.close(facts["progress"])
    _import(facts["modules"])
    _print_where_the_parent_does(facts["stderr"])
    # Only after the imports: the trainer waits for them, and with a low priority they could take minutes.
    _lower_priority()
    server = importlib.import_module("holdfast._writer_process.server")
    server.serve(socket.socket(fileno=facts["link"]), progress)


def _end_with(parent: int) -> None:
    """Have the system kill this process when the thread that started it ends, for whatever reason."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux: the process ends when its socket does
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(0)


def _import(modules: list[str]) -> None:
    import torch  # noqa: PLC0415 - only now is it certain that this process ends with its parent

    torch.set_num_threads(1)
    for name in ("holdfast._writer_process.server", *modules):
        importlib.import_module(name)
    # None of this is ever garbage. Frozen, it costs nothing in the collections after each request.
    gc.collect()
    gc.freeze()
    gc.disable()


def _print_where_the_parent_does(fd: int) -> None:
    """Use the parent's stderr from now on. Until now a file kept the output, for the message of a failure."""
    printed = os.pread(2, 1 << 20, 0)
    sys.stderr.flush()
    os.dup2(fd, 2)
    os.close(fd)
    with contextlib.suppress(OSError):  # nobody reads it, or its disk is full
        os.write(2, printed)
    with contextlib.suppress(OSError, ValueError):
        faulthandler.enable()
    logging.basicConfig(format="%(levelname)s:%(name)s:%(message)s (writer process %(process)d)")


# With all cores busy, 1 GiB took 25 s at 19, 11 s at 15 and 4.5 s at 10; the program that kept them busy was
# slower by 2, 4 and up to 39% meanwhile.
_NICENESS = 15


def _lower_priority() -> None:
    """Leave processor and disk to others.

    The priority at the disk follows from the niceness: it is low, but still served. The idle class is not
    served at all while others keep the disk busy, and the trainer would wait for its staging buffer.
    """
    with contextlib.suppress(OSError):
        # Not less than it is: the system refuses that to all but root.
        os.setpriority(os.PRIO_PROCESS, 0, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(AttributeError, OSError):
        # A batch task that wakes up does not interrupt the one that runs.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
