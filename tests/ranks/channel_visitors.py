"""What ranks do while strangers connect to them, with few files to open, and with forked children."""

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tests.ranks.faulty import Raised, caught, loaded, state

import holdfast

GARBAGE = (b"", b"x", b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(300), b"\x80\x05]\x94." * 60)


def listening_ports() -> set[int]:
    """The ports on which this process listens."""
    mine = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder itself was open as one
            mine.add(os.readlink(f"/proc/self/fd/{number}"))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                ports.add(int(words[1].rsplit(":", 1)[1], 16))
    return ports


def tell_all(value: Any, source: int) -> Any:
    told = [value]
    dist.broadcast_object_list(told, src=source)
    return told[0]


def visit(port: int, said: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=30)
    if said:
        made.sendall(said)
    return made


def save_among_visitors(folder: str, limit: int, visitors: int) -> list[Any]:
    """Rank 0 may open few files; rank 1 opens more connections to it than that, and holds them."""
    before = listening_ports()
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    holdfast.save(state(1.0), checkpoint_id=folder)
    ports = tell_all(sorted(listening_ports() - before), 0)
    strangers = []
    if dist.get_rank() == 1:
        strangers = [visit(port, b"") for port in ports for _ in range(visitors)]
        strangers += [visit(port, said) for port in ports for said in GARBAGE * 3]
    dist.barrier()
    seen: list[Any] = [caught(lambda: holdfast.save(state(2.0), checkpoint_id=folder))]
    group = dist.new_group([0, 1])  # has a channel of its own
    seen.append(caught(lambda: holdfast.save(state(3.0), checkpoint_id=folder, process_group=group)))
    seen.append(loaded(folder))
    dist.barrier()
    for stranger in strangers:
        stranger.close()
    return seen


def limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def save_with_few_files(folder: str, spare: int) -> tuple[Raised | None, bool]:
    """Rank 0 may open only so many files more than it has; whether the limit is the same afterwards."""
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + spare, limits()[1]))
    before = limits()
    raised = caught(lambda: holdfast.save(state(1.0), checkpoint_id=folder))
    return raised, limits() == before


class ForkingWriter(holdfast.FileSystemWriter):
    """One rank forks a child in the middle of the save, as a DataLoader does, and is killed."""

    def __init__(self, folder: str, rank: int, fork: Callable[[], None]) -> None:
        super().__init__(folder)
        self.forking_rank = rank
        self.fork = fork

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == self.forking_rank:
            self.fork()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_data(plan, planner)


def fork_and_die(folder: str, rank: int) -> tuple[Raised | None, bool]:
    """What the others raise, and whether the child was still there when they did."""
    holdfast.save(state(1.0), checkpoint_id=folder)
    child = Path(f"{folder}-child")

    def fork() -> None:
        ready, told = os.pipe()
        if os.fork() == 0:
            child.write_text(str(os.getpid()))
            os.close(told)
            time.sleep(120)
            os._exit(0)
        os.close(told)
        os.read(ready, 1)  # ends when the child has closed its end, too

    writer = ForkingWriter(folder, rank, fork)
    raised = caught(lambda: holdfast.save(state(2.0), storage_writer=writer, peer_timeout=60.0))
    is_there = Path(f"/proc/{child.read_text()}").exists()
    survivors = [survivor for survivor in range(dist.get_world_size()) if survivor != rank]
    dist.barrier(dist.new_group(survivors, use_local_synchronization=True))
    if dist.get_rank() == survivors[0]:
        os.kill(int(child.read_text()), signal.SIGKILL)
    return raised, is_there
