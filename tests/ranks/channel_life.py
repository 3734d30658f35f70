"""What ranks do with the channel of their group: share it, outlive it, disagree on it, be late for it."""

import functools
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.ranks.faulty import Case, Raised, SavePlanner, Writer, caught, loaded, state, stop

import holdfast
from holdfast._ranks.channel import open_channel
from holdfast._ranks.group_exchange import open_exchange
from holdfast._ranks.worker import WorkerEnd

FINE = Case("", "", -1)


def all_pids() -> list[int]:
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    return pids


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast")]


def save_beside_training(folder: str) -> tuple[int, float, list[float]]:
    """Six saves in a thread while the trainer goes on with collectives on the default group."""
    open_channel()
    failed: list[BaseException] = []

    def save_all() -> None:
        try:
            for number in range(6):
                holdfast.save(state(float(number)), checkpoint_id=f"{folder}/{number}")
        except BaseException as error:
            failed.append(error)

    saver = threading.Thread(target=save_all)
    saver.start()
    steps, total = 0, torch.zeros(1)
    is_saving = torch.ones(1)
    while is_saving.item():
        total = torch.ones(1)
        dist.all_reduce(total)
        is_saving = torch.tensor([float(saver.is_alive())])
        dist.all_reduce(is_saving)
        steps += 1
    saver.join()
    if failed:
        raise failed[0]
    return steps, total.item(), [loaded(f"{folder}/{number}") for number in range(6)]


def save_in_pairs(folder: str) -> tuple[float, list[float], float]:
    """Two groups of two save into different folders at once, over and over; then all four together."""
    pair = dist.get_rank() // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for number in range(5):
        mine = {f"{dist.get_rank()}": torch.full((50,), float(pair * 10 + number))}
        holdfast.save(mine, checkpoint_id=f"{folder}/{pair}", process_group=groups[pair])
    again = {f"{dist.get_rank()}": torch.zeros(50)}
    holdfast.load(again, checkpoint_id=f"{folder}/{pair}", process_group=groups[pair])
    both = []
    dist.barrier()
    for other in range(2):
        everything = {str(other * 2): torch.zeros(50), str(other * 2 + 1): torch.zeros(50)}
        holdfast.load(everything, checkpoint_id=f"{folder}/{other}")
        both.append(torch.cat(list(everything.values())).mean().item())
    holdfast.save(state(7.0), checkpoint_id=f"{folder}/all")
    return again[f"{dist.get_rank()}"].mean().item(), both, loaded(f"{folder}/all")


def stay_out_of_a_group(folder: str) -> Raised | None:
    group = dist.new_group([0])
    return caught(lambda: holdfast.save(state(1.0), checkpoint_id=folder, process_group=group))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def make_the_group_anew(folder: str) -> list[Any]:
    """Three default groups in a row, each with a channel of its own that ends with it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    seen: list[Any] = []
    for number in range(3):
        if number:
            store = dist.FileStore(f"{folder}-store{number}", world)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        holdfast.save(state(float(number)), checkpoint_id=folder)
        during = our_threads()
        dist.barrier()
        there = loaded(folder)
        dist.barrier()
        dist.destroy_process_group()
        seen.append((there, during, our_threads(), open_files()))
    return seen


def be_late_for_a_failure(folder: str) -> list[Raised | None]:
    """The last rank comes when the others have failed already and wait in the next save."""
    open_channel()
    failing = Case("OSError", "plan", 1)
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        dist.barrier()
    calls = []
    for number, case in enumerate((failing, FINE)):
        calls.append(
            caught(
                lambda case=case: holdfast.save(  # type: ignore[misc]
                    state(1.0), checkpoint_id=folder, planner=SavePlanner(case), peer_timeout=2.0
                )
            )
        )
        if number == 0 and dist.get_rank() != last:
            dist.barrier()
    return calls


def make_different_calls(folder: str) -> list[Raised | None]:
    holdfast.save(state(1.0), checkpoint_id=folder)
    if dist.get_rank() == 1:
        first = caught(lambda: holdfast.load(state(0.0), checkpoint_id=folder))
    else:
        first = caught(lambda: holdfast.save(state(2.0), checkpoint_id=folder))
    return [first, caught(lambda: holdfast.save(state(2.0), checkpoint_id=folder))]


def fail_before_the_first_step(folder: str) -> list[Raised | None]:
    """One rank gives no place to save to."""
    place = None if dist.get_rank() == 1 else folder
    first = caught(lambda: holdfast.save(state(1.0), checkpoint_id=place))
    return [first, caught(lambda: holdfast.save(state(2.0), checkpoint_id=folder))]


class SignallingWriter(holdfast.FileSystemWriter):
    """Rank 0 sends a signal to another rank that waits, and goes on when that one has had it."""

    def __init__(self, folder: str, place: str, pid: int, number: int) -> None:
        super().__init__(folder)
        self.place, self.pid, self.number = place, pid, number
        self.mark = Path(f"{folder}-interrupted")

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 0 and self.place == "write":
            self.send()
        return super().write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        if self.place == "commit":
            self.send()
        super().finish(metadata, results)

    def send(self) -> None:
        os.kill(self.pid, self.number)
        while not self.mark.exists() and Path(f"/proc/{self.pid}/stat").read_text().split()[2] != "Z":
            time.sleep(0.001)


def interrupt_one_that_waits(folder: str, place: str) -> tuple[Raised | None, float]:
    """SIGINT reaches rank 1 while rank 0 is at that place."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pids = all_pids()
    holdfast.save(state(1.0), checkpoint_id=folder)
    writer = SignallingWriter(folder, place, pids[1], signal.SIGINT)
    raised = caught(lambda: holdfast.save(state(2.0), storage_writer=writer))
    if dist.get_rank() == 1:
        writer.mark.touch()
    dist.barrier()
    return raised, loaded(folder)


def kill_one_that_has_delivered(folder: str) -> tuple[Raised | None, float]:
    pids = all_pids()
    writer = SignallingWriter(folder, "commit", pids[1], signal.SIGKILL)
    raised = caught(lambda: holdfast.save(state(2.0), storage_writer=writer))
    return raised, loaded(folder)


def stop_outside_of_a_save(folder: str) -> list[Raised | None]:
    """A rank stops while it is training and the others are in a save."""
    pids = all_pids()
    holdfast.save(state(1.0), checkpoint_id=folder)
    seen = []
    for stopped in (1, 0):
        if dist.get_rank() == stopped:
            stop()
        seen.append(caught(lambda: holdfast.save(state(2.0), checkpoint_id=folder, peer_timeout=1.5)))
        if dist.get_rank() != stopped:
            os.kill(pids[stopped], signal.SIGCONT)
        dist.barrier()
    assert loaded(folder) == 1.0
    dist.barrier()
    seen.append(caught(lambda: holdfast.save(state(2.0), checkpoint_id=folder)))
    return seen


class AskingWriter(holdfast.FileSystemWriter):
    """Stops before its commit, and asks afterwards whether it still may."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self.context = kwargs["context"]

    def finish(self, metadata: Any, results: Any) -> None:
        stop()
        self.context.confirm_commit()
        super().finish(metadata, results)


def stop_before_the_commit(folder: str, asks: bool) -> tuple[Raised | None, float]:
    pids = all_pids()
    holdfast.save(state(1.0), checkpoint_id=folder)
    writer = AskingWriter(folder) if asks else Writer(folder, Case("SIGSTOP", "commit", 0))
    raised = caught(lambda: holdfast.save(state(2.0), storage_writer=writer, peer_timeout=1.5))
    if dist.get_rank() != 0:
        os.kill(pids[0], signal.SIGCONT)
    dist.barrier()
    there = loaded(folder)
    dist.barrier()
    holdfast.save(state(3.0), checkpoint_id=folder)
    return raised, there


def break_a_connection(folder: str) -> list[Any]:
    """The network breaks a connection though both ends are well."""
    channel = open_channel()
    holdfast.save(state(1.0), checkpoint_id=folder)
    dist.barrier()
    if isinstance(channel.end, WorkerEnd) and dist.get_rank() == 1:
        channel.end._peer.connection.shutdown(socket.SHUT_RDWR)
        while channel.end._lost is None:
            time.sleep(0.001)
    dist.barrier()
    caught(lambda: holdfast.save(state(2.0), checkpoint_id=folder))  # fails if the others were faster
    dist.barrier()
    return [caught(lambda: holdfast.save(state(3.0), checkpoint_id=folder)), loaded(folder)]


def talk() -> list[Any]:
    """Exchanges by themselves: what travels, what does not, and what is left."""
    heard: list[Any] = []
    with open_exchange(None, purpose="talk") as exchange:
        rank, world = exchange.rank, exchange.world_size
        block = torch.arange(3_000_000, dtype=torch.int32).numpy()
        sums = exchange.decide("blocks", lambda: block + rank, lambda parts: [int(p.sum()) for p in parts])
        heard.append(sums - int(block.sum()) == rank * block.size)
        back = exchange.agree("back", lambda: rank, lambda ranks: (ranks, block))
        heard.append((back[0], bool((back[1] == block).all())))
        heard.append(exchange.share("share", lambda: {"from": rank, "block": block})["from"])
        heard.append(exchange.agree("nothing", lambda: None, lambda _: None))
    heard.append(world)
    heard.append(caught(_say_what_cannot_be_said))
    heard.append(caught(_answer_what_cannot_be_said))
    heard.append(caught(_share_an_error))
    heard.append(caught(_leave_between_steps))
    with open_exchange(None, purpose="talk") as exchange:
        heard.append(exchange.agree("again", lambda: exchange.rank, _total))
    return heard


def _say_what_cannot_be_said() -> None:
    with open_exchange(None, purpose="talk") as exchange:
        exchange.agree("say", functools.partial(_unsayable, exchange.rank), _count)


def _unsayable(rank: int) -> Any:
    return threading.Lock() if rank == 1 else 0


def _total(ranks: list[int]) -> int:
    return sum(ranks)


def _count(parts: list[Any]) -> int:
    return len(parts)


def _answer_what_cannot_be_said() -> None:
    with open_exchange(None, purpose="talk") as exchange:
        exchange.agree("answer", lambda: 0, lambda _: threading.Lock())


def _share_an_error() -> None:
    with open_exchange(None, purpose="talk") as exchange:
        exchange.share("metadata", lambda: Path("/nowhere").read_text())


def _leave_between_steps() -> None:
    with open_exchange(None, purpose="talk") as exchange:
        exchange.agree("first", lambda: None, lambda _: None)
        if exchange.rank == 1:
            raise ValueError("on purpose")
        exchange.agree("second", lambda: None, lambda _: None)


def save_in_a_world_of_one(folder: str) -> tuple[float, list[str]]:
    holdfast.save(state(1.0), checkpoint_id=folder)
    return loaded(folder), our_threads()


def pass_on(megabytes: int, repeats: int) -> list[Any]:
    """Each rank of a broadcast is the source in turn; how fast the last one was, in bytes a second."""
    seen: list[Any] = []
    with open_exchange(None, purpose="talk") as exchange:
        size = megabytes << 20

        def go_round() -> float:
            with exchange.open_broadcast(range(exchange.world_size)) as broadcast:
                for source in range(exchange.world_size):
                    buffer = bytearray([source + 1 if exchange.rank == source else 0]) * (size + 7)
                    broadcast.send_to_all(memoryview(buffer), source)
                    seen.append(buffer == bytearray([source + 1]) * (size + 7))
                began = time.monotonic()
                for _ in range(repeats):
                    broadcast.send_to_all(memoryview(buffer), 0)
                return repeats * len(buffer) / (time.monotonic() - began)

        rates = exchange.agree("pass on", go_round, lambda rates: rates)
        rings = max(1, exchange.world_size // 2)
        mine = [rank for rank in range(exchange.world_size) if rank % rings == exchange.rank % rings]

        def in_two_broadcasts() -> bool:
            with exchange.open_broadcast(mine) as broadcast, exchange.open_broadcast(mine) as second:
                buffers = [bytearray([exchange.rank + 1]) * 1000 for _ in range(2)]
                broadcast.send_to_all(memoryview(buffers[0]), mine[0])
                second.send_to_all(memoryview(buffers[1]), mine[-1])
                return buffers == [bytearray([mine[0] + 1]) * 1000, bytearray([mine[-1] + 1]) * 1000]

        seen.append(exchange.agree("two", in_two_broadcasts, all))
    return [all(seen), rates]


def lose_a_rank_of_a_broadcast(kind: str) -> Raised | None:
    """Rank 1 fails in the middle of what is passed on."""
    pids = all_pids()

    def pass_and_fail(exchange: Any) -> None:
        with exchange.open_broadcast([0, 1, 2]) as broadcast:
            buffer = memoryview(bytearray(100 << 20))
            broadcast.send_to_all(buffer[:10], 0)
            if exchange.rank == 1:
                Case(kind, "here", 1).meet("here")
            for _ in range(3):
                broadcast.send_to_all(buffer, 0)

    def run() -> None:
        with open_exchange(None, purpose="talk", peer_timeout=1.5) as exchange:
            exchange.agree("pass on", lambda: pass_and_fail(exchange), lambda _: None)

    raised = caught(run)
    if kind == "SIGSTOP" and dist.get_rank() != 1:
        os.kill(pids[1], signal.SIGCONT)
    return raised
