"""Planners, writers and readers that meet a fault at a chosen place, and what ranks do with them."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import holdfast
from holdfast import CheckpointException

SAVE_PLACES = ("plan", "global plan", "write", "commit")
LOAD_PLACES = ("load metadata", "load plan", "load global plan", "read")
OF_THE_COORDINATOR = ("global plan", "commit", "load global plan")


class UnpicklableError(Exception):
    def __reduce__(self) -> str:
        raise TypeError("not through this door")


def raise_os_error() -> None:
    raise OSError(5, "on purpose")


def raise_unpicklable() -> None:
    raise UnpicklableError("on purpose")


def interrupt() -> None:
    raise KeyboardInterrupt


def leave() -> None:
    sys.exit(3)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_at_once() -> None:
    os._exit(4)


FAULTS: dict[str, Callable[[], None]] = {
    "OSError": raise_os_error,
    "unpicklable": raise_unpicklable,
    "KeyboardInterrupt": interrupt,
    "SystemExit": leave,
    "SIGSTOP": stop,
    "SIGKILL": kill,
    "_exit": exit_at_once,
}


class Case(NamedTuple):
    fault: str
    place: str
    rank: int

    def __str__(self) -> str:
        return f"{self.fault}-{self.place.replace(' ', '_')}-{self.rank}"

    def meet(self, place: str) -> None:
        if place == self.place and dist.get_rank() == self.rank:
            FAULTS[self.fault]()


class SavePlanner(holdfast.DefaultSavePlanner):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def create_local_plan(self) -> Any:
        self.case.meet("plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        self.case.meet("global plan")
        return super().create_global_plan(all_plans)


class Writer(holdfast.FileSystemWriter):
    def __init__(self, folder: str, case: Case) -> None:
        super().__init__(folder)
        self.case = case

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.case.meet("write")
        return super().write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        self.case.meet("commit")
        super().finish(metadata, results)


class LoadPlanner(holdfast.DefaultLoadPlanner):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def create_local_plan(self) -> Any:
        self.case.meet("load plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        self.case.meet("load global plan")
        return super().create_global_plan(all_plans)


class Reader(holdfast.FileSystemReader):
    def __init__(self, folder: str, case: Case) -> None:
        super().__init__(folder)
        self.case = case

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        self.case.meet("load metadata")
        return super().read_metadata(*args, **kwargs)

    def read_data(self, plan: Any, planner: Any) -> Any:
        self.case.meet("read")
        return super().read_data(plan, planner)


def state(value: float) -> dict[str, Any]:
    return {f"of rank {dist.get_rank()}": torch.full((100,), value), "shared": torch.full((10,), value)}


def loaded(folder: str) -> float:
    """The one value that the whole checkpoint holds, read by this process alone."""
    found = state(-1.0)
    holdfast.load(found, checkpoint_id=folder, no_dist=True)
    values = {value for tensor in found.values() for value in tensor.tolist()}
    assert len(values) == 1, values
    return float(values.pop())


class Raised(NamedTuple):
    """What a call raised, in a form that travels."""

    kind: str
    step: str | None
    failures: dict[int, str]
    seconds: float


def caught(call: Callable[[], Any]) -> Raised | None:
    began = time.monotonic()
    try:
        call()
    except CheckpointException as error:
        failures = {rank: f"{type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()}
        return Raised("CheckpointException", error.step, failures, time.monotonic() - began)
    except BaseException as error:
        return Raised(type(error).__name__, None, {}, time.monotonic() - began)
    return None


def meet_fault(case: Case, folder: str, peer_timeout: float) -> Raised | None:
    """The save or load of a case."""
    if case.place in SAVE_PLACES:
        return caught(
            lambda: holdfast.save(
                state(2.0),
                storage_writer=Writer(folder, case),
                planner=SavePlanner(case),
                peer_timeout=peer_timeout,
            )
        )
    return caught(
        lambda: holdfast.load(
            state(0.0),
            storage_reader=Reader(folder, case),
            planner=LoadPlanner(case),
            peer_timeout=peer_timeout,
        )
    )


def survive_in_sequence(folder: str, cases: list[Case], peer_timeout: float) -> list[Any]:
    """One fault after the other on the same group; for each, what was raised and what is there after it."""
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    holdfast.save(state(1.0), checkpoint_id=folder)
    seen = []
    for case in cases:
        raised = meet_fault(case, folder, peer_timeout)
        if case.fault == "SIGSTOP" and dist.get_rank() != case.rank:
            os.kill(pids[case.rank], signal.SIGCONT)
        dist.barrier()
        there = loaded(folder)
        dist.barrier()
        holdfast.save(state(1.0), checkpoint_id=folder)
        seen.append((raised, there))
    return seen


def lose_a_rank(folder: str, case: Case, peer_timeout: float) -> tuple[Raised | None, float, float]:
    """A fault that ends a rank; then the survivors make a group of their own and go on."""
    holdfast.save(state(1.0), checkpoint_id=folder)
    raised = meet_fault(case, folder, peer_timeout)
    there = loaded(folder)
    survivors = [rank for rank in range(dist.get_world_size()) if rank != case.rank]
    group = dist.new_group(survivors, use_local_synchronization=True)
    again = caught(lambda: holdfast.save(state(4.0), checkpoint_id=folder, peer_timeout=peer_timeout))
    assert again is not None
    assert list(again.failures) == [case.rank], again
    holdfast.save(state(3.0), checkpoint_id=folder, process_group=group)
    return raised, there, loaded(folder)


class BlockedWriter(holdfast.FileSystemWriter):
    """Blocks on one rank until a file appears, as storage may."""

    def __init__(self, folder: str, rank: int, release: str) -> None:
        super().__init__(folder)
        self.slow_rank = rank
        self.release = release

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == self.slow_rank:
            with open(self.release, "rb") as pipe:  # returns when the other end is opened
                pipe.read()
        return super().write_data(plan, planner)


def write_slowly(folder: str, peer_timeout: float, times: float) -> float:
    """Both ends wait in turn for a rank whose storage takes several timeouts."""
    for slow in range(dist.get_world_size()):
        pipe = f"{folder}-{slow}"
        if dist.get_rank() == slow:
            os.mkfifo(pipe)
            if os.fork() == 0:  # opens the other end after a while, whatever happens here
                time.sleep(times * peer_timeout)
                os.close(os.open(pipe, os.O_WRONLY))
                os._exit(0)
        writer = BlockedWriter(folder, slow, pipe)
        holdfast.save(state(float(slow)), storage_writer=writer, peer_timeout=peer_timeout)
    return loaded(folder)


class HoldingPlanner(holdfast.DefaultSavePlanner):
    """Keeps Python's lock for long, as a pickle of millions of records does."""

    def __init__(self, rank: int, seconds: float) -> None:
        super().__init__()
        self.holding_rank = rank
        self.seconds = seconds

    def create_local_plan(self) -> Any:
        if dist.get_rank() == self.holding_rank:
            ctypes.PyDLL(None).usleep(int(self.seconds * 1e6))  # PyDLL keeps the lock, CDLL would not
        return super().create_local_plan()


def hold_the_lock(folder: str, peer_timeout: float, times: float) -> float:
    for rank in range(dist.get_world_size()):
        planner = HoldingPlanner(rank, times * peer_timeout)
        holdfast.save(state(5.0), checkpoint_id=folder, planner=planner, peer_timeout=peer_timeout)
    return loaded(folder)
