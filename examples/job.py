"""Starts the ranks of the training job as processes of this machine, and waits for all of them to end."""

import dataclasses
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).with_name("training.py")
LONGEST_JOB = 300.0
"""Seconds after which a job is taken for hung. It needs about ten."""
_ERROR = re.compile(r"^[\w.]*(?:Error|Exception)\b", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Ended:
    """How one rank ended.

    Attributes:
        rank: Its number.
        status: Its exit status; minus the number of the signal that killed it; None if it had to be stopped.
        seconds: When it ended, counted from the start of the job.
        output: What it printed.
    """

    rank: int
    status: int | None
    seconds: float
    output: str

    @property
    def error(self) -> str:
        """The exception that ended it, without the traceback; empty if there was none."""
        text = self.output.replace(f"[rank{self.rank}]: ", "").rpartition("Traceback (most recent")[2]
        found = _ERROR.search(text)
        return text[found.start() :].strip() if found else ""


def run_job(world_size: int, logs: Path, *arguments: str, patience: float = LONGEST_JOB) -> list[Ended]:
    """Run ``training.py`` on that many ranks, and return how each ended, in rank order.

    Args:
        world_size: How many ranks.
        logs: The folder for what they print.
        arguments: What the script is given.
        patience: How many seconds the others have after one rank failed; they are stopped then.
    """
    logs.mkdir(parents=True)
    environment = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": "1",
    }
    ranks = []
    for rank in range(world_size):
        with (logs / f"rank-{rank}.txt").open("wb") as log:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, str(SCRIPT), *arguments],
                    env={**environment, "RANK": str(rank)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    ended = _wait_for_all(ranks, patience)
    return [
        Ended(rank, status, seconds, (logs / f"rank-{rank}.txt").read_text(errors="replace"))
        for rank, (status, seconds) in enumerate(ended)
    ]


def _wait_for_all(ranks: list[subprocess.Popen[bytes]], patience: float) -> list[tuple[int | None, float]]:
    start = time.monotonic()
    deadline = start + LONGEST_JOB
    ended: dict[int, tuple[int | None, float]] = {}
    try:
        while len(ended) < len(ranks) and time.monotonic() < deadline:
            for number, process in enumerate(ranks):
                if number not in ended and process.poll() is not None:
                    ended[number] = (process.returncode, time.monotonic() - start)
                    if process.returncode != 0:
                        deadline = min(deadline, time.monotonic() + patience)
            time.sleep(0.01)  # waiting for any of several children has no portable call of its own
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [ended.get(number, (None, time.monotonic() - start)) for number in range(len(ranks))]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
