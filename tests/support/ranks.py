"""Real gloo ranks: one process imports torch, and each rank is forked from it in milliseconds."""

import atexit
import functools
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

ROOT = Path(__file__).parents[2]

_FORK_SERVER = """
import atexit, importlib, json, os, pickle, sys, threading, traceback
import torch, torch.distributed as dist
import holdfast
from holdfast import default_planner, filesystem, state_dict_loader, state_dict_saver
print("ready", flush=True)

def be_a_rank(rank, module, task):
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
    module = importlib.import_module(task["module"])
    pids = []
    for rank in range(task["world"]):
        pid = os.fork()
        if pid == 0:
            if task["finalize"]:
                be_a_rank(rank, module, task)
                sys.exit()
            end_early_after(be_a_rank, rank, module, task)
        pids.append(pid)
    print(json.dumps(pids), flush=True)
    print(json.dumps([os.waitpid(pid, 0)[1] for pid in pids]), flush=True)

def end_early_after(function, *args):
    # All that a program does at its end but taking the interpreter down, which takes a second in each rank.
    status = 1
    try:
        function(*args)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

for line in sys.stdin:
    run(json.loads(line))
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


def python_environment() -> dict[str, str]:
    """The environment for a Python process that imports the same package and tests as this one."""
    places = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(place for place in places if place)}


class RankProcesses:
    """Forks ranks for any number of runs, one run at a time."""

    def __init__(self) -> None:
        environment = {**python_environment(), "OMP_NUM_THREADS": "1"}
        environment.pop("MASTER_ADDR", None)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FORK_SERVER],
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
        finalize: bool = False,
    ) -> list[Outcome]:
        """Call ``function(*args)`` on each rank of a new gloo group; how each ended, in rank order.

        The function must be defined at the top of its module. Ranks that have not ended after ``timeout``
        seconds are killed. With ``destroy`` each rank destroys its process group before it ends. With
        ``finalize`` Python takes each interpreter down as it does for any program, which takes longer.
        """
        with tempfile.TemporaryDirectory() as folder:
            task = {
                "module": function.__module__,
                "name": function.__name__,
                "world": world_size,
                "folder": folder,
                "destroy": destroy,
                "finalize": finalize,
                "args": pickle.dumps(args).hex(),
            }
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(task).encode() + b"\n")
            self._process.stdin.flush()
            pids = json.loads(self._line(120))
            try:
                statuses = json.loads(self._line(timeout))
            except TimeoutError:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)  # nobody has waited for it yet: the number is still its own
                statuses = json.loads(self._line(30))
            return [_outcome(Path(folder), rank, status) for rank, status in enumerate(statuses)]

    def close(self) -> None:
        """End the process that ranks are forked from."""
        self._process.kill()
        self._process.communicate()

    def _line(self, timeout: float) -> str:
        assert self._process.stdout is not None
        until = time.monotonic() + timeout
        while b"\n" not in self._unread:
            if not select.select([self._process.stdout], [], [], max(0, until - time.monotonic()))[0]:
                raise TimeoutError
            more = os.read(self._process.stdout.fileno(), 65536)
            assert more, "the process that ranks are forked from has ended"
            self._unread += more
        line, self._unread = self._unread.split(b"\n", 1)
        return line.decode()


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120) -> list[Any]:
    """Call ``function(*args)`` on each rank of a new group; it must be defined at the top of its module.

    Returns:
        For each rank ``("returned", value)`` or ``("raised", traceback)``; ``("ended", what it printed)`` if
        it ended without either.
    """
    found = rank_processes().run(function, world_size, *args, timeout=timeout, destroy=True)
    return [(one.kind, one.stderr if one.kind == "ended" else one.value) for one in found]


@functools.cache
def rank_processes() -> RankProcesses:
    """The one process from which all ranks of this test run are forked; started by the first call."""
    made = RankProcesses()
    atexit.register(made.close)
    return made


def _outcome(folder: Path, rank: int, status: int) -> Outcome:
    stderr = (folder / f"stderr{rank}").read_text()
    out = folder / f"out{rank}"
    kind, value = pickle.loads(out.read_bytes()) if out.exists() else ("ended", None)
    return Outcome(kind, value, status, stderr)
