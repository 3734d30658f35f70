"""Runs jobs on ranks that are forked from a process which has imported a framework once: that takes seconds.

``python fork_server.py MODULE...`` reads a line of JSON for each run, and prints the wait statuses of its
ranks. A rank has the environment that torchrun gives it. If one fails, the others are killed.
"""

import atexit
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from typing import Any


def run(task: dict[str, Any]) -> list[int]:
    """Run a job; its output goes to a file."""
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        port = str(any_port.getsockname()[1])
    pids = [_fork(task, rank, port) for rank in range(task["world"])]
    statuses: dict[int, int] = {}
    while len(statuses) < len(pids):
        pid, status = os.wait()
        statuses[pid] = status
        if status:
            for other in set(pids) - statuses.keys():
                os.kill(other, signal.SIGKILL)
    return [statuses[pid] for pid in pids]


def _fork(task: dict[str, Any], rank: int, port: str) -> int:
    pid = os.fork()
    if pid == 0:
        _be_a_rank(task, rank, port)
    return pid


def _be_a_rank(task: dict[str, Any], rank: int, port: str) -> None:
    output = os.open(task["output"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    number, world = str(rank), str(task["world"])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_RUN_ID="forked")
    os.environ.update(
        RANK=number, LOCAL_RANK=number, GROUP_RANK="0", WORLD_SIZE=world, LOCAL_WORLD_SIZE=world
    )
    sys.argv = [task["job"], json.dumps(task["settings"])]
    sys.path.insert(0, os.path.dirname(task["job"]))
    status = 1
    try:
        runpy.run_path(task["job"], run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    # All that a program does at its end but taking the interpreter down, which takes a second in each rank.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    for module in (*sys.argv[1:], "torch._dynamo", "torch.distributed.fsdp"):
        importlib.import_module(module)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)  # noqa: T201
    os._exit(0)
