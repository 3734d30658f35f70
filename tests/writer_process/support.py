"""Writers, planners and saves of the tests of the writer process, which imports this module too."""

import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.futures import Future

from holdfast._engine.adapt import adapt_save_planner, adapt_writer
from holdfast._engine.save import run_save
from holdfast._ranks.exchange import Alone
from holdfast._staging.stage import Staging
from holdfast._staging.staged import StagedState
from holdfast._writer_process.process_writer import ProcessWriter
from holdfast.default_planner import DefaultSavePlanner
from holdfast.filesystem import FileSystemWriter
from holdfast.metadata import Metadata, MetadataIndex
from holdfast.planner import SavePlan, SavePlanner, WriteItem
from holdfast.storage import StorageWriter, WriteResult

MIB = 1 << 20


def staged(state: dict[str, Any]) -> StagedState:
    return Staging(shared_memory=True).stage(state)


def save_in_process(
    state: dict[str, Any], writer: StorageWriter, planner: SavePlanner | None = None
) -> ProcessWriter:
    with staged(state) as copy:
        made = ProcessWriter(adapt_writer(writer), copy)
        run_save(copy.state, adapt_save_planner(planner or DefaultSavePlanner()), made, Alone())
    return made


class Background:
    """A save in a thread, as ``async_save`` runs it."""

    def __init__(self, state: dict[str, Any], writer: StorageWriter, planner: SavePlanner) -> None:
        self.copy = staged(state)
        self.writer = ProcessWriter(adapt_writer(writer), self.copy)
        self.error: BaseException | None = None
        self._planner = planner
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            run_save(self.copy.state, adapt_save_planner(self._planner), self.writer, Alone())
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(120)
        assert not self._thread.is_alive()
        self.copy.release()


class Gate:
    """Where the writer process waits for the test: two named pipes."""

    def __init__(self, folder: Path) -> None:
        self.reached, self.opened = str(folder / "reached"), str(folder / "opened")
        os.mkfifo(self.reached)
        os.mkfifo(self.opened)

    def wait_here(self) -> None:
        """Called in the writer process."""
        with open(self.reached, "w") as pipe:
            pipe.write(str(os.getpid()))
        with open(self.opened) as pipe:
            pipe.read()

    def pid_of_who_waits(self) -> int:
        """Called in the test; returns when the writer process waits."""
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


class Counter:
    """Counts how often this very object was pickled."""

    def __init__(self) -> None:
        self.pickled = 0
        self.seen = 0

    def __reduce__(self) -> Any:
        self.pickled += 1
        return Counter, ()


class NotingWriter(ToldWriter):
    """Notes in many ways what it has written; what it cannot send back is an attribute, or its result."""

    def __init__(self, told: str = "note", private: tuple[str, ...] = ()) -> None:
        super().__init__(told)
        self.private = private
        self.numbers = [1]
        self.by_key: dict[str, list[int]] = {"a": []}
        self.counter = SimpleNamespace(seen=0)
        self.alias = self.numbers
        self.unchanged = Counter()
        self.committed: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self.private}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        self.numbers.append(2)
        self.by_key["a"].append(3)
        self.counter.seen += 4
        if self.told == "attribute":
            self.lock = threading.Lock()
        done: Any = super().write_data(plan, planner)
        self.seen = ["new"]
        if self.told != "result":
            return done  # type: ignore[no-any-return]
        unsendable: Any = Future()
        unsendable.wait = lambda: [threading.Lock()]
        return unsendable  # type: ignore[no-any-return]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.committed = {
            "set": self.seen,
            "list": self.numbers,
            "dict": self.by_key,
            "object": self.counter.seen,
            "again": self.alias is self.numbers,
        }


class ReportingWriter(ToldWriter):
    """Reports three quarters of 4 MiB to the context of its save, waits at a gate, and reports the rest."""

    def __init__(self, gate: Gate) -> None:
        super().__init__("report")
        self.pipes = gate
        self.context: Any = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.context = kwargs.get("context")

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        self.context.progress.advance(3 * MIB)
        self.pipes.wait_here()
        self.context.progress.advance(MIB)
        raise AssertionError("it was not cancelled")


class LockedWriter(FileSystemWriter):
    """Cannot be pickled."""

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        self.lock = threading.Lock()


def die_beside_a_blocked_writer_process(folder: str) -> None:
    """Run as a program: prints the id of the writer process while that writes, then is killed."""
    gate = Gate(Path(folder))
    state = {"first": torch.zeros(20 * MIB), "last": torch.zeros(4)}
    Background(state, FileSystemWriter(Path(folder) / "checkpoint"), GatedPlanner(gate))
    print(gate.pid_of_who_waits(), flush=True)  # noqa: T201
    threading.Event().wait()
