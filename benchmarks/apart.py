"""The process of one save or one load, as a job that has just been started does it.

``python -m benchmarks.apart SIDE save|load|cold FOLDER NBYTES`` prints the seconds. ``cold`` lets the page
cache forget all files after the process has started and before it loads.
"""

import subprocess
import sys
import warnings
from pathlib import Path

from benchmarks.peers import side_called
from benchmarks.states import bulk
from benchmarks.turns import drop_caches, load_turn, save_turn

__all__ = ["run_apart"]


def run_apart(side: str, operation: str, folder: Path, nbytes: int) -> float:
    """Seconds of one operation of one side on about ``nbytes``, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.apart", side, operation, str(folder), str(nbytes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def _act(name: str, operation: str, folder: Path, nbytes: int) -> float:
    side, contents = side_called(name), bulk(nbytes)
    side.warm_up(folder.parent)
    if operation == "save":
        return save_turn(side, contents.filled(), folder)
    target = contents.blank()
    if operation == "cold":
        drop_caches()
    return load_turn(side, contents, target, folder)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    name_, operation_, folder_, nbytes_ = sys.argv[1:]
    print(_act(name_, operation_, Path(folder_), int(nbytes_)))
