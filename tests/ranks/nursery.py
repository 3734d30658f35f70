"""Rank processes by the dozen: one process imports torch, and ranks are forked from it in milliseconds."""

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_PARENT = """
import importlib, json, os, pickle, sys, traceback
import torch, torch.distributed as dist
import holdfast
from holdfast import default_planner, filesystem, state_dict_loader, state_dict_saver
module = importlib.import_module(sys.argv[1])
print("ready", flush=True)

def be_a_rank(rank, task):
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    errors = os.open(f"{task['folder']}/stderr{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    store = dist.FileStore(f"{task['folder']}/store", task["world"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=task["world"])
    try:
        result = ("returned", getattr(module, task["name"])(*pickle.loads(bytes.fromhex(task["args"]))))
    except Exception as error:
        result = ("raised", "".join(traceback.format_exception(error)))
    with open(f"{task['folder']}/out{rank}.tmp", "wb") as out:
        out.write(pickle.dumps(result))
    os.rename(f"{task['folder']}/out{rank}.tmp", f"{task['folder']}/out{rank}")
    if task["destroy"]:
        dist.destroy_process_group()

def run(task):
    pids = []
    for rank in range(task["world"]):
        pid = os.fork()
        if pid == 0:
            be_a_rank(rank, task)
            return True
        pids.append(pid)
    print(json.dumps(pids), flush=True)
    print(json.dumps([os.waitpid(pid, 0)[1] for pid in pids]), flush=True)
    return False

for line in sys.stdin:
    if run(json.loads(line)):
        break
"""


class Outcome(NamedTuple):
    """How one rank ended.

    Attributes:
        kind: ``"returned"``, ``"raised"``, or ``"ended"`` if its function did neither.
        value: What it returned, the traceback, or None.
        status: Its exit status as ``os.waitpid`` gives it.
        stderr: What it printed.
    """

    kind: str
    value: Any
    status: int
    stderr: str


class Nursery:
    """Forks ranks that run functions of one module."""

    def __init__(self, module: str) -> None:
        root = Path(__file__).parents[2]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}",
        }
        environment.pop("MASTER_ADDR", None)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PARENT, module],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._unread = b""
        assert self._line(120) == "ready"

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 120,
        destroy: bool = False,
    ) -> list[Outcome]:
        """Call ``function(*args)`` on each rank of a new gloo group; how each ended, in rank order.

        Whatever is left of them after ``timeout`` is killed: the guard against a hang.
        """
        with tempfile.TemporaryDirectory() as folder:
            task = {
                "name": function.__name__,
                "world": world_size,
                "folder": folder,
                "destroy": destroy,
                "args": pickle.dumps(args).hex(),
            }
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(task).encode() + b"\n")
            self._process.stdin.flush()
            pids = json.loads(self._line(30))
            try:
                statuses = json.loads(self._line(timeout))
            except TimeoutError:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)  # it is its parent's child still: nobody has waited for it
                statuses = json.loads(self._line(30))
            return [_outcome(Path(folder), rank, status) for rank, status in enumerate(statuses)]

    def close(self) -> None:
        """End the parent of all ranks."""
        self._process.kill()
        self._process.communicate()

    def _line(self, timeout: float) -> str:
        assert self._process.stdout is not None
        until = time.monotonic() + timeout
        while b"\n" not in self._unread:
            if not select.select([self._process.stdout], [], [], max(0, until - time.monotonic()))[0]:
                raise TimeoutError
            more = os.read(self._process.stdout.fileno(), 65536)
            assert more, "the parent of the ranks has died"
            self._unread += more
        line, self._unread = self._unread.split(b"\n", 1)
        return line.decode()


def _outcome(folder: Path, rank: int, status: int) -> Outcome:
    stderr = (folder / f"stderr{rank}").read_text()
    out = folder / f"out{rank}"
    kind, value = pickle.loads(out.read_bytes()) if out.exists() else ("ended", None)
    return Outcome(kind, value, status, stderr)
