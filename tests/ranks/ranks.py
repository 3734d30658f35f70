"""Runs a function on several real gloo ranks and brings back what each returned or raised."""

import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CHILD = """
import importlib.util, pickle, sys, traceback
import torch.distributed as dist
file, name, rank, world, port, out, args = sys.argv[1:]
spec = importlib.util.spec_from_file_location("ranked", file)
module = importlib.util.module_from_spec(spec)
sys.modules["ranked"] = module
spec.loader.exec_module(module)
where = f"tcp://127.0.0.1:{port}"
dist.init_process_group("gloo", init_method=where, rank=int(rank), world_size=int(world))
try:
    result = ("returned", getattr(module, name)(*pickle.loads(bytes.fromhex(args))))
except Exception as error:
    result = ("raised", "".join(traceback.format_exception(error)))
open(out, "wb").write(pickle.dumps(result))
dist.destroy_process_group()
"""


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120) -> list[Any]:
    """Call ``function(*args)`` on each rank of a new group; it must be defined at the top of its module.

    Returns:
        For each rank ``("returned", value)`` or ``("raised", traceback)``; None if it ended without either.
    """
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        file = sys.modules[function.__module__].__file__
        outs = [Path(folder, str(rank)) for rank in range(world_size)]
        path = f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        children = [
            subprocess.Popen(
                [
                    *(sys.executable, "-c", _CHILD, str(file), function.__name__),
                    *(str(rank), str(world_size), str(port), str(out), pickle.dumps(args).hex()),
                ],
                env=environment,
            )
            for rank, out in enumerate(outs)
        ]
        try:
            for child in children:
                child.wait(timeout)
        finally:
            for child in children:
                child.kill()
        return [pickle.loads(out.read_bytes()) if out.exists() else None for out in outs]
