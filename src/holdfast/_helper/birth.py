"""Owns the first steps of the helper: tied to its parent, deaf to the terminal, and humble.

What is here runs before torch is imported, so that a parent that dies meanwhile leaves nothing behind.
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

from holdfast._helper.slate import Slate

__all__ = ["DEAF_TO", "PROGRAM", "main"]

PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2].split(chr(10)); "
    "from holdfast._helper.birth import main; main(sys.argv[1])"
)
"""What the helper's interpreter runs. The caller's ``__main__`` is not run again, and nothing is looked for
in the working folder before the path is the caller's."""

DEAF_TO = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""What is sent to all processes of a terminal or a job. Whether a save is finished then is the parent's
affair, and with the parent the helper ends."""

_PR_SET_PDEATHSIG = 1


def main(description: str) -> None:
    """Become a helper; returns only by the end of the process.

    Args:
        description: JSON: ``parent`` (its process id), ``link``, ``slate`` and ``stderr`` (descriptors), and
            ``modules`` to import.
    """
    facts: dict[str, Any] = json.loads(description)
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    _end_with(facts["parent"])
    slate = Slate(facts["slate"])
    os.close(facts["slate"])
    _import(facts["modules"])
    _take_stderr(facts["stderr"])
    # After the imports: they are waited for, and would take minutes of what training leaves of all cores.
    _be_humble()
    serving = importlib.import_module("holdfast._helper.serving")
    serving.serve(socket.socket(fileno=facts["link"]), slate)


def _end_with(parent: int) -> None:
    """Have the system kill this process when the parent's thread that made it ends, however it ends."""
    with contextlib.suppress(AttributeError, OSError):  # systems other than Linux: the socket's end must do
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(0)


def _import(modules: list[str]) -> None:
    import torch  # noqa: PLC0415 - the parent must be watched before

    torch.set_num_threads(1)
    for name in ("holdfast._helper.serving", *modules):
        importlib.import_module(name)
    # Nothing of this is ever garbage; a collection after each save then costs nothing.
    gc.collect()
    gc.freeze()
    gc.disable()


def _take_stderr(fd: int) -> None:
    """From now on print where the parent prints; what was said so far was kept for the case of a failure."""
    said = os.pread(2, 1 << 20, 0)
    sys.stderr.flush()
    os.dup2(fd, 2)
    os.close(fd)
    if said:
        os.write(2, said)
    with contextlib.suppress(OSError, ValueError):
        faulthandler.enable()
    logging.basicConfig(format="%(levelname)s:%(name)s:%(message)s (helper process %(process)d)")


# Where all cores are busy, 1 GiB took 25 s at 19, 11 s at 15 and 4.5 s at 10; what they were busy with was
# slower by 2, 4 and up to 39% meanwhile.
_NICENESS = 15


def _be_humble() -> None:
    """Take what others leave of the processor and, by that, of the disk.

    The priority at the disk follows from the niceness: one of the lowest that are still served. The class
    below, idle, is not served at all while others keep the disk busy, and the trainer waits for the memory.
    """
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    with contextlib.suppress(AttributeError, OSError):
        # A batch task that wakes up does not interrupt the one that runs.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
