"""Writers, planners and saves that the tests of the helper hand over; importable in the helper too."""

import logging
import os
import threading
from pathlib import Path
from typing import Any

import torch
from torch.futures import Future

from holdfast._engine.save import run_save
from holdfast._helper import RemoteWriter, remote_writer
from holdfast._ranks.exchange import Alone
from holdfast._staging.stage import Staging
from holdfast._staging.staged import StagedState
from holdfast.default_planner import DefaultSavePlanner
from holdfast.filesystem import FileSystemWriter
from holdfast.metadata import Metadata, MetadataIndex
from holdfast.planner import SavePlan, SavePlanner, WriteItem
from holdfast.storage import StorageWriter, WriteResult

MIB = 1 << 20


def staged(state: dict[str, Any]) -> StagedState:
    return Staging(shared_memory=True).stage(state)


def save_remotely(
    state: dict[str, Any], writer: StorageWriter, planner: SavePlanner | None = None
) -> RemoteWriter:
    with staged(state) as copy:
        remote = remote_writer(writer, copy)
        run_save(copy.state, planner or DefaultSavePlanner(), remote, Alone())
    return remote


class Background:
    """A save in a thread, as ``async_save`` runs it."""

    def __init__(self, state: dict[str, Any], writer: StorageWriter, planner: SavePlanner) -> None:
        self.copy = staged(state)
        self.remote = remote_writer(writer, self.copy)
        self.error: BaseException | None = None
        self._planner = planner
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            run_save(self.copy.state, self._planner, self.remote, Alone())
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(120)
        assert not self._thread.is_alive()
        self.copy.release()


class Gate:
    """Where the helper waits for the test: two pipes with names."""

    def __init__(self, folder: Path) -> None:
        self.reached, self.opened = str(folder / "reached"), str(folder / "opened")
        os.mkfifo(self.reached)
        os.mkfifo(self.opened)

    def wait_here(self) -> None:
        """Called in the helper."""
        with open(self.reached, "w") as pipe:
            pipe.write(str(os.getpid()))
        with open(self.opened) as pipe:
            pipe.read()

    def pid_of_who_waits(self) -> int:
        """Called in the test; returns when the helper has come to the gate."""
        with open(self.reached) as pipe:
            return int(pipe.read())

    def open(self) -> None:
        with open(self.opened, "w") as pipe:
            pipe.write("go")


class GatedPlanner(DefaultSavePlanner):
    """Waits at a gate before it gives the value ``last``."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn == "last":
            self.gate.wait_here()
        return super().resolve_data(write_item)


class HalvingPlanner(DefaultSavePlanner):
    """Saves floats in half of their bits; notes in which process it did."""

    def create_local_plan(self) -> SavePlan:
        self.state_dict = {
            key: value.bfloat16() if isinstance(value, torch.Tensor) else value
            for key, value in self.state_dict.items()
        }
        return super().create_local_plan()

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        value = os.getpid() if write_item.index.fqn == "pid" else object
        return super().transform_object(write_item, value)


class UnpicklableError(Exception):
    def __reduce__(self) -> str:
        raise TypeError("not through this door")


class ToldWriter(StorageWriter):
    """Writes nothing, and does what it was told: a name of an error, or text to return."""

    def __init__(self, told: str, gate: Gate | None = None) -> None:
        self.told = told
        self.gate = gate
        self.seen: list[str] = []

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        if self.gate is not None:
            self.gate.wait_here()
        if self.told == "raise what cannot be pickled":
            raise UnpicklableError("on purpose")
        if self.told.startswith("raise"):
            raise OSError(5, self.told)
        if self.told == "log":
            logging.getLogger("holdfast.told").info("said by the writer")
        self.seen = [self.told, f"{threading.active_count() > 0}"]
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(item.index.fqn), 0, self.told) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class LockedWriter(FileSystemWriter):
    """Cannot be pickled."""

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        self.lock = threading.Lock()


def die_beside_a_blocked_helper(folder: str) -> None:
    """Run as a program: prints the helper's id while that is in the middle of a write, then is killed."""
    gate = Gate(Path(folder))
    state = {"first": torch.zeros(20 * MIB), "last": torch.zeros(4)}
    Background(state, FileSystemWriter(Path(folder) / "checkpoint"), GatedPlanner(gate))
    print(gate.pid_of_who_waits(), flush=True)  # noqa: T201
    threading.Event().wait()


class PlacedWriter(FileSystemWriter):
    """Notes on which CPUs it may run, before each write and in it."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self.cpus: list[set[int]] = []

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        self.cpus = [os.sched_getaffinity(os.getpid()), os.sched_getaffinity(0)]
        return super().write_data(plan, planner)
