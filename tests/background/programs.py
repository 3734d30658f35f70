"""What forked processes do for the tests of endings and of ranks: each function is one program."""

import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.background.gated import HANG_GUARD, Failing, Gated
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast.staging import DefaultStager, StagingOptions
from holdfast.state_dict_saver import SaveFuture, async_save, set_grace_period

SIZE = 1000


def state(value: float) -> dict[str, Any]:
    return {"x": torch.full((SIZE,), float(value)), "step": int(value)}


def saving(*args: Any, **kwargs: Any) -> SaveFuture:
    future = async_save(*args, **kwargs)
    assert isinstance(future, SaveFuture)
    return future


def loaded(folder: str | Path) -> float:
    found = state(-1)
    holdfast.load(found, checkpoint_id=folder, no_dist=True)
    value = float(found["x"].unique().item())
    assert found["step"] == int(value)
    return value


# Endings of a process alone.


class AfterTheEnd(holdfast.FileSystemWriter):
    """Writes when the main thread has ended, and the interpreter waits for nothing but this save."""

    def write_data(self, plan: holdfast.SavePlan, planner: holdfast.SavePlanner) -> Any:
        threading.main_thread().join()
        return super().write_data(plan, planner)


def leave_during_a_save(folder: str, status: int) -> None:
    async_save(state(2), storage_writer=AfterTheEnd(folder))
    if status:
        sys.exit(status)


def leave_an_unseen_failure(folder: str) -> None:
    async_save(state(2), storage_writer=Failing(folder))


def leave_a_failure_of_the_last_moment(folder: str) -> None:
    class Both(AfterTheEnd):
        def finish(self, metadata: holdfast.Metadata, results: Any) -> None:
            raise OSError(5, "on purpose")

    async_save(state(2), storage_writer=Both(folder))


def leave_a_seen_failure(folder: str) -> None:
    assert isinstance(saving(state(2), storage_writer=Failing(folder)).exception(HANG_GUARD), OSError)


def be_killed_during_a_save(folder: str, number: int) -> None:
    writer = Gated(folder)
    async_save(state(2), storage_writer=writer)
    assert writer.reached.wait(HANG_GUARD)
    os.kill(os.getpid(), number)
    time.sleep(HANG_GUARD)


def finish_in_the_grace_period(folder: str) -> None:
    set_grace_period(HANG_GUARD)
    writer = Gated(folder)
    async_save(state(2), storage_writer=writer)
    assert writer.reached.wait(HANG_GUARD)
    os.kill(os.getpid(), signal.SIGTERM)
    writer.may_go.set()
    time.sleep(HANG_GUARD)


def give_up_after_the_grace_period(folder: str) -> None:
    os.environ["HOLDFAST_GRACE_PERIOD"] = "0.1"
    writer = Gated(folder)
    async_save(state(2), storage_writer=writer)
    assert writer.reached.wait(HANG_GUARD)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Timer(0.5, writer.may_go.set).start()
    time.sleep(HANG_GUARD)


def keep_their_handler(folder: str) -> bool:
    calls: list[int] = []

    def handler(number: int, _: Any) -> None:
        calls.append(number)

    signal.signal(signal.SIGTERM, handler)
    set_grace_period(5)
    future = saving(state(2), checkpoint_id=folder)
    os.kill(os.getpid(), signal.SIGTERM)
    future.result(HANG_GUARD)
    return calls == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is handler


def fill_the_disk(folder: str) -> tuple[Any, float]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    future = saving({"x": torch.ones(1 << 20), "step": 2}, checkpoint_id=folder)
    error = future.exception(HANG_GUARD)
    assert isinstance(error, OSError)
    return error.errno, loaded(folder)


def save_fifty_times(folder: str) -> list[int]:
    """The resident memory after each save, in KiB."""
    tensors = {str(n): torch.ones(1 << 20) for n in range(16)}
    sizes = []
    for _ in range(50):
        writer = holdfast.FileSystemWriter(folder, sync_files=False)
        saving(tensors, storage_writer=writer).result(HANG_GUARD)
        status = Path("/proc/self/status").read_text()
        sizes.append(int(status.split("VmRSS:")[1].split()[0]))
    return sizes


# Ranks together.


def train_beside_saves(folder: str) -> list[float]:
    """Collectives of the default group all the while; each checkpoint has the values of its moment."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(torch.zeros(64, 8), mesh, [Shard(0)])
    futures = []
    for step in range(8):
        with torch.no_grad():
            weight.fill_(step)
        futures.append(saving({"w": weight, "step": step}, checkpoint_id=f"{folder}/{step}"))
        for _ in range(20):
            dist.all_reduce(torch.ones(100))
    for future in futures:
        future.result(HANG_GUARD)
    found = []
    for step in range(8):
        whole = {"w": torch.zeros(64, 8), "step": -1}
        holdfast.load(whole, checkpoint_id=f"{folder}/{step}", no_dist=True)
        assert whole["step"] == step
        found.append(float(whole["w"].unique().item()))  # type: ignore[attr-defined]
    return found


def raised(call: Any) -> str:
    try:
        call()
    except holdfast.CheckpointException as error:
        return str(error) if isinstance(error, OSError) else "not the class of its cause"
    return "nothing"


def fail_on_one_rank(folder: str, next_call: str) -> tuple[str, str, str, float]:
    """Rank 0 looks at its future and rank 1 does not; the next call raises on both, the one after works."""
    kind = Failing if dist.get_rank() == 1 else holdfast.FileSystemWriter
    holdfast.save(state(1), checkpoint_id=folder)
    future = saving(state(2), storage_writer=kind(folder))
    while not future.done():
        time.sleep(0.01)
    looked = raised(lambda: future.result(0)) if dist.get_rank() == 0 else ""
    dist.barrier()
    calls = {
        "save": lambda: holdfast.save(state(3), checkpoint_id=folder),
        "async_save": lambda: async_save(state(3), checkpoint_id=folder),
        "load": lambda: holdfast.load(state(0), checkpoint_id=folder),
    }
    first = raised(calls[next_call])
    between = loaded(folder)
    dist.barrier()
    saving(state(4), checkpoint_id=folder).result(HANG_GUARD)
    assert loaded(folder) == 4.0
    return looked, first, raised(lambda: holdfast.load(state(0), checkpoint_id=folder)), between


def cancel_on_one_rank(folder: str) -> tuple[bool, bool, list[str]]:
    writer = Gated(folder)
    future = saving(state(2), storage_writer=writer)
    assert writer.reached.wait(HANG_GUARD)
    accepted = future.cancel() if dist.get_rank() == 1 else False
    dist.barrier()
    writer.may_go.set()
    while not future.done():
        time.sleep(0.01)
    dist.barrier()
    left = sorted(os.listdir(folder))
    dist.barrier()
    holdfast.save(state(3), checkpoint_id=folder)
    return accepted, future.cancelled(), left


def skip_where_one_rank_is_busy(folder: str) -> tuple[bool, str, float]:
    stager = DefaultStager(StagingOptions(use_async_staging=False))
    writer = Gated(f"{folder}/own")
    mine = None
    if dist.get_rank() == 1:
        mine = saving(state(1), storage_writer=writer, async_stager=stager, no_dist=True)
    skipped = saving(state(2), checkpoint_id=f"{folder}/all", async_stager=stager, when_busy="skip").skipped
    try:
        async_save(state(2), checkpoint_id=f"{folder}/all", async_stager=stager, when_busy="raise")
        error = "nothing"
    except ValueError as refused:
        error = str(refused)
    writer.may_go.set()
    if mine is not None:
        mine.result(HANG_GUARD)
    saving(state(3), checkpoint_id=f"{folder}/all", async_stager=stager).result(HANG_GUARD)
    return skipped, error, loaded(f"{folder}/all")


class Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("not to be copied")


def fail_to_stage_on_one_rank(folder: str) -> tuple[str, str]:
    """Where it happens, and what it says; then both save together again."""
    given = {"x": Uncopyable()} if dist.get_rank() == 1 else {"x": 1}
    try:
        future = async_save(given, checkpoint_id=folder)
    except ValueError as error:
        outcome = ("call", str(error))
    else:
        assert isinstance(future, SaveFuture)
        outcome = ("future", str(future.exception(HANG_GUARD)))
    dist.barrier()
    holdfast.save(state(3), checkpoint_id=folder)
    assert loaded(folder) == 3.0
    return outcome


def lose_a_rank(folder: str) -> str:
    writer = Gated(folder)
    future = saving(state(2), storage_writer=writer)
    assert writer.reached.wait(HANG_GUARD)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    writer.may_go.set()
    return str(future.exception(HANG_GUARD))


def leave_at_once(folder: str) -> None:
    """The group is destroyed, and the process ends, before the save does."""
    async_save(state(2), storage_writer=AfterTheEnd(folder))


def leave_a_failure_of_one_rank(folder: str) -> None:
    kind = Failing if dist.get_rank() == 1 else holdfast.FileSystemWriter
    async_save(state(2), storage_writer=kind(folder))


def look_at_metadata_of_a_removed_checkpoint(folder: str) -> str:
    """What a rank finds that looks at the metadata of a large save only after the checkpoint is gone."""
    metadata = saving({f"k{n}": torch.zeros(1) for n in range(20_001)}, checkpoint_id=folder).result()
    assert metadata is not None
    dist.barrier()
    if dist.get_rank() == 0:
        os.unlink(os.path.join(folder, ".metadata"))
    dist.barrier()
    try:
        return type(metadata.state_dict_metadata["k7"]).__name__
    except holdfast.errors.CheckpointNotFoundError as error:
        return type(error).__name__
